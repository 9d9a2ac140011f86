"""A model -> a report that no sequence of a pack sees another, or an error that names the layer.

The probe runs packs of random tokens and changes one sequence at a time. A change in another sequence's
logits is a leak, and so is a gradient of one sequence's logits at another's inputs. A sequence must give the
same result in its own pack, and with transformers' eager attention. A trailing pad must not change gradients.
Legend: T slots in a pack, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd._checks import flags, host_ints, instance, real_number, whole_number
from lightning_thd._find import text_config
from lightning_thd.batch import THDBatch
from lightning_thd.models.pack import packed
from lightning_thd.models.preparing import prepare_if_asked
from lightning_thd.models.probe_model import (
    attention_configs,
    averaging_norms,
    calls_noted,
    first_leaking_module,
    in_fp32,
    lengths_to_reach,
    logits_alone,
    logits_of,
    lowered_limits,
    no_zero_weights,
    undisturbed,
    working_dtype,
)
from lightning_thd.models.probe_port import Port, Reference
from lightning_thd.models.probe_report import PackingLeakError, PackingReport

Forward = Callable[[nn.Module, THDBatch], Any]
LENGTHS = (7, 1, 16, 3, 8)

# Tolerances relative to the largest logit or gradient. Leak checks compare runs of equal shapes, which differ
# only by the order of sums in expert kernels. Error checks compare different shapes, which round differently.
_LEAK: dict[torch.dtype, float] = {torch.float64: 1e-12, torch.float32: 1e-6}
_ERROR: dict[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_LEAK, _HALF_ERROR = 1e-2, 5e-2
_PAD = 5  # slots of the trailing pad
_MANY = 300_000_000  # parameters; up to this number, two sets of gradients or an fp32 copy should fit


def check_options(vocab_size: object, tolerance: object) -> None:
    """Refuse a vocabulary size and a tolerance that are not valid numbers."""
    if vocab_size is not None:
        whole_number(vocab_size, "vocab_size", least=8, advice="Pass the number of tokens.")
    if tolerance is not None:
        real_number(tolerance, "tolerance", advice="Pass None to choose by the dtype.")


def check_packing(
    model: nn.Module,
    vocab_size: int | None = None,
    lengths: Sequence[int] = LENGTHS,
    grad: bool = True,
    *,
    forward: Forward | None = None,
    tolerance: float | None = None,
    raise_on_leak: bool = True,
    seed: int = 0,
    thorough: bool = True,
    reference: Reference | None = None,
) -> PackingReport:
    """Check whether any sequence of a pack sees another, and whether a port equals what it was ported from.

    During the check the model is in ``eval()``, and parameters that are all zero hold small noise. Batch
    norms that average over the pack in the model's present mode fail the check. For S sequences the check
    takes about S + 6 forward passes of ``sum(lengths)`` tokens, and S + 3 backward passes with ``grad``.

    Args:
        model: a Hugging Face model, or any model that ``forward`` can call.
        vocab_size: V; the default is read from the config.
        lengths: lengths of at least two sequences; include 1, and one longer than the model's window.
        grad: check gradients of the inputs too.
        forward: ``forward(model, batch)`` returns logits ``[T, V]`` or ``[1, T, V]``, or one row for each of
            S sequences. The default is ``model(**batch.hf_kwargs())`` if the model is from transformers or
            takes ``input_ids``, else ``model(batch)``.
        tolerance: the largest allowed difference between a sequence in the pack and in a pack of one,
            relative to the largest logit or gradient; None chooses it by the dtype.
        raise_on_leak: raise an error instead of returning a report that is not ok.
        seed: the seed of the random tokens.
        thorough: compare with stock eager attention, and check that a trailing pad changes no gradient. If
            ``lengths`` is left out, the check adds a sequence longer than all windows, chunks and rope limits
            below 1,024 tokens. Limits from 1,024 on are set to 9 during the check.
        reference: what the model was ported from: a module, or a function of one row of ids ``[1, L]`` that
            returns logits. It runs every sequence without packing. A module runs with the weights of
            ``model`` if its parameters have the same names, else with its own. Limits are then not lowered.

    Returns:
        The report, which prints as a table. If a model in half precision differs without a leak and
        ``tolerance`` is None, a second run in fp32 decides, unless it fails or there are over 3e8 weights.

    Raises:
        PackingLeakError: if a check fails and ``raise_on_leak``; it names the first wrong module, if found.
        ValueError: for fewer than two lengths, a length of 0, an unknown vocabulary, or all logits zero.
    """
    instance(model, "model", nn.Module, advice="Pass the model itself.")
    lengths = host_ints(lengths, "lengths", advice="Pass at least two lengths.").tolist()
    check_options(vocab_size, tolerance)
    whole_number(seed, "seed")
    flags(grad=grad, raise_on_leak=raise_on_leak, thorough=thorough)
    prepare_if_asked(model)
    run = forward or default_forward(model)
    port = None if reference is None else Port(model, reference)
    if tuple(lengths) == LENGTHS:
        lengths = _default_lengths(model, run, vocab_size, seed, port, thorough=thorough)
    norms = averaging_norms(model)

    def measure() -> _Probe:
        with calls_noted(norms) as ran:
            probe = _Probe(model, run, batch, grad=grad)
        probe.measured["batch_norms"] = tuple(dict.fromkeys(ran))
        if thorough:
            probe.compare_with_stock()
            probe.add_a_pad()
        if port is not None:
            probe.compare_with_reference(port)
        return probe

    limits = lowered_limits(model) if thorough and port is None else nullcontext()
    noise = no_zero_weights(model) if port is None or port.shares_weights else nullcontext()
    beside = nullcontext() if port is None else port.undisturbed(grad=grad)
    with undisturbed(model, grad=grad), beside, noise, limits:
        batch = random_pack(model, vocab_size, lengths, seed)
        report = _judged(measure(), tolerance)
        if not report.ok and not report.leaks and tolerance is None:
            report = _without_rounding(model, measure) or report
    if raise_on_leak and not report.ok:
        raise PackingLeakError(report)
    return report


def _default_lengths(
    model: nn.Module,
    run: Forward,
    vocab_size: int | None,
    seed: int,
    port: Port | None,
    *,
    thorough: bool,
) -> tuple[int, ...]:
    """Return ``LENGTHS``, without 1 if the model refuses one token, and with one beyond all windows."""
    lengths: tuple[int, ...] = LENGTHS
    with undisturbed(model, grad=False):
        single = random_pack(model, vocab_size, (1, 1), seed)
        single = THDBatch.collate([{"input_ids": single.input_ids[:1].cpu()}]).to(single.input_ids.device)
        try:
            run(model, single)
            alone_fails = False
        except Exception:  # the checks below show whether the model fails on other lengths too
            alone_fails = True
    if alone_fails:
        lengths = tuple(length for length in LENGTHS if length > 1)
    if port is not None:
        return (*lengths, *port.lengths_to_reach(max(LENGTHS)))
    return (*lengths, *lengths_to_reach(model, max(LENGTHS))) if thorough else lengths


def _judged(probe: _Probe, tolerance: float | None) -> PackingReport:
    report = probe.report(tolerance)
    return report if report.ok else probe.report(tolerance, module=probe.culprit(report))


def _without_rounding(model: nn.Module, measure: Callable[[], _Probe]) -> PackingReport | None:
    """Measure a model in fp32, because rounding may route tokens to other experts; None if it cannot run."""
    with in_fp32(model, most=_MANY) as precise:
        if not precise:
            return None
        try:
            probe = measure()
        except Exception:  # a kernel may exist only in half precision; keep the first measurement
            return None
        probe.skipped.append("rounding of half precision: differs, so measured in fp32")
        return _judged(probe, None)


class _Probe:
    """The model runs of one leak check, and the batches they use."""

    def __init__(self, model: nn.Module, run: Forward, batch: THDBatch, *, grad: bool) -> None:
        self.model, self.name = model, type(model).__name__
        self.run, self.batch, self.grad = run, batch, grad
        self.port: Port | None = None
        self.inputs: Tensor | None = None
        self.dtype = torch.float32
        self.measured: dict[str, Any] = {"leak": 0.0, "error": 0.0}
        self.measured |= {"gradient_leak": None, "gradient_error": None}
        self.worst: dict[str, int] = {}  # the sequence at which each number was measured
        self.skipped: list[str] = []
        self._measure()

    def keep(self, name: str, found: float, index: int) -> None:
        """Keep an error of a sequence if it is the largest of its kind; NaN counts as the largest."""
        known = self.measured.get(name) or 0.0
        if name not in self.worst or (known == known and not found <= known):
            self.measured[name], self.worst[name] = found, index

    def changed(self, index: int) -> THDBatch:
        """Return the pack with every token of one sequence replaced."""
        ids = self.batch.input_ids.clone()
        slots = slots_of(self.batch, index)
        known = torch.unique(ids)
        # Each token becomes the next larger id of the pack, the largest becomes the smallest: no id is new.
        rank = torch.searchsorted(known, ids[slots])
        ids[slots] = known[(rank + 1) % len(known)]
        return self.batch.replace(input_ids=ids)

    def alone(self, index: int) -> THDBatch:
        """Return one sequence as its own pack."""
        ids = self.batch.input_ids[slots_of(self.batch, index)]
        return THDBatch.collate([{"input_ids": ids.cpu()}]).to(ids.device)

    def logits(self, batch: THDBatch) -> Tensor:
        """Return the model's logits of a pack: a row for each slot, or for each sequence."""
        logits = logits_of(self.run(self.model, batch))
        slots, count = len(batch.input_ids), len(batch.lengths)
        if len(logits) not in (slots, count, count + 1):  # a classifier gives a trailing pad a row too
            wrong = f"{self.name} gives {len(logits)} rows for {slots} slots of {count} sequences"
            raise ValueError(f"{wrong}. Pass a forward= that gives one row for each.")
        return logits if len(logits) == slots else logits[:count]

    def _measure(self) -> None:
        with self._inputs_watched():
            whole = self.logits(self.batch)
            inputs = self.inputs
            self.dtype = working_dtype(self.model, whole)
            scale = whole.detach().abs().max().item()
            if scale == 0:
                raise ValueError(
                    f"{self.name} gives logits that are all zero. Pass a forward= that does not."
                )
            for index in range(len(self.batch.lengths)):
                with torch.no_grad():
                    moved = (self.logits(self.changed(index)) - whole).abs().amax(-1)
                moved[slots_of(self.batch, index, rows=len(moved))] = 0
                self.keep("leak", moved.max().item() / scale, index)
                self._compare(index, whole, inputs, scale)

    def _compare(self, index: int, whole: Tensor, inputs: Tensor | None, scale: float) -> None:
        slots, rows = slots_of(self.batch, index), slots_of(self.batch, index, rows=len(whole))
        alone = self.logits(self.alone(index))
        self.keep("error", (alone.detach() - whole.detach()[rows]).abs().max().item() / scale, index)
        if not self.grad:
            return
        assert inputs is not None
        assert self.inputs is not None
        weights = torch.randn_like(alone)
        last = index == len(self.batch.lengths) - 1
        (packed_grad,) = torch.autograd.grad((whole[rows] * weights).sum(), inputs, retain_graph=not last)
        (alone_grad,) = torch.autograd.grad((alone * weights).sum(), self.inputs)
        packed_grad, alone_grad = packed_grad.flatten(0, -2), alone_grad.flatten(0, -2)
        largest = max(alone_grad.abs().max().item(), torch.finfo(alone_grad.dtype).tiny)
        self.keep("gradient_error", (packed_grad[slots] - alone_grad).abs().max().item() / largest, index)
        packed_grad[slots] = 0
        self.keep("gradient_leak", packed_grad.abs().max().item() / largest, index)

    def compare_with_stock(self) -> None:
        """Run every sequence under stock eager attention, shortest first."""
        if not attention_configs(self.model):
            self.skipped.append("stock eager attention: not a transformers model")
            return
        ids, lengths = self.batch.input_ids, self.batch.lengths
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])  # dynamic ropes keep the longest length
        try:
            with torch.no_grad():
                wanted = {i: logits_alone(self.model, ids[slots_of(self.batch, i)]) for i in order}
        except Exception as error:  # the family may need more arguments, such as images or labels
            self.skipped.append(f"stock eager attention: {type(error).__name__} in a plain call")
            return
        with torch.no_grad():
            whole = self.logits(self.batch)
        if any(x.shape[-1] != whole.shape[-1] for x in wanted.values()):
            self.skipped.append("stock eager attention: its logits are not what forward() returns")
            return
        scale = max(x.abs().max().item() for x in wanted.values())
        for i, x in wanted.items():
            rows = slots_of(self.batch, i, rows=len(whole))
            self.keep("reference_error", (whole[rows] - x).abs().max().item() / scale, i)

    def compare_with_reference(self, port: Port) -> None:
        """Run every sequence through the reference, and compare its logits and all weights' gradients."""
        self.port = port
        self.skipped += port.skipped
        whole = self.logits(self.batch)
        rows = [ids[None] for ids in self.batch.unpack(self.batch.input_ids)]
        wanted = [port.logits(ids) for ids in rows]
        scale = max(max(x.detach().abs().max().item() for x in wanted), torch.finfo(torch.float32).tiny)
        for i, x in enumerate(wanted):
            got = whole[slots_of(self.batch, i, rows=len(whole))]
            if got.shape != x.shape:
                raise ValueError(
                    f"reference gives logits {list(x.shape)} for a sequence of which {self.name} gives "
                    f"{list(got.shape)}. Return one row for each token, or one for the sequence."
                )
            self.keep("port_error", (got - x).detach().abs().max().item() / scale, i)
        weights = [p for p in self.model.parameters() if p.requires_grad and p.is_floating_point()]
        if not self.grad or not port.shares_weights or sum(p.numel() for p in weights) > _MANY:
            return
        factors = torch.randn_like(whole)
        parts = [factors[slots_of(self.batch, i, rows=len(whole))] for i in range(len(rows))]
        ours = (whole * factors).sum()
        theirs = torch.stack([(x * part).sum() for x, part in zip(wanted, parts, strict=True)]).sum()
        found = [torch.autograd.grad(each, weights, allow_unused=True) for each in (ours, theirs)]
        zero = torch.zeros(())
        for a, b in zip(*found, strict=True):
            if a is not None or b is not None:
                a, b = (zero.to(weights[0].device) if x is None else x for x in (a, b))
                largest = max(b.abs().max().item(), 1e-3 * scale, 1e-30)
                self.keep("port_gradient", (a - b).abs().max().item() / largest, 0)

    def add_a_pad(self) -> None:
        """Compare the gradients of parameters with and without a trailing pad."""
        parameters = [p for p in self.model.parameters() if p.requires_grad and p.is_floating_point()]
        size = sum(p.numel() for p in parameters)
        if not self.grad or not parameters or size > _MANY:
            if self.grad:
                self.skipped.append(f"gradients with a trailing pad: {size:,} parameters")
            return
        rows, slots = self.batch.unpack(self.batch.input_ids.cpu()), sum(self.batch.lengths)
        padded = THDBatch.collate([{"input_ids": ids} for ids in rows], pad_to=slots + _PAD)
        given = [self.logits(x)[:slots] for x in (self.batch, padded.to(self.batch.input_ids.device))]
        weights = torch.randn_like(given[0])
        found = [torch.autograd.grad((x * weights).sum(), parameters, allow_unused=True) for x in given]
        pairs = [(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None]
        largest = max((a.abs().max().item() for a, _ in pairs), default=0.0)
        for a, b in pairs:
            scale = max(a.abs().max().item(), 1e-3 * largest, 1e-30)
            self.keep("pad_error", (a - b).abs().max().item() / scale, 0)

    @contextmanager
    def _inputs_watched(self) -> Generator[None]:
        """Make the embedding's output a leaf in this context, so that its gradient can be read."""

        def cut(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return output
            self.inputs = output.detach().requires_grad_()
            return self.inputs.clone()  # some models change the output in place

        with embedding_of(self.model).register_forward_hook(cut) if self.grad else nullcontext():
            yield

    def report(self, tolerance: float | None, *, module: str | None = None) -> PackingReport:
        """Return the measurements as a report; ``module`` is the first wrong module."""
        config: Any = getattr(self.model, "config", None)
        return PackingReport(
            model=self.name,
            attention=getattr(config, "_attn_implementation", None),
            layers=getattr(text_config(config), "num_hidden_layers", None),
            lengths=self.batch.lengths,
            leak_tolerance=_LEAK.get(self.dtype, _HALF_LEAK),
            tolerance=_ERROR.get(self.dtype, _HALF_ERROR) if tolerance is None else tolerance,
            skipped=tuple(self.skipped),
            module=module,
            **self.measured,
        )

    def culprit(self, report: PackingReport) -> str | None:
        """Return the name for ``PackingReport.module``: a batch norm, or the first module that differs."""
        with torch.no_grad():
            if report.batch_norms and report.same and not report.leaks:
                return report.batch_norms[0]
            run_pack, tolerance = partial(self.logits, self.batch), report.tolerance
            if report.leak > report.leak_tolerance:
                others = torch.ones(self.batch.input_ids.shape[-1], dtype=torch.bool)
                others[slots_of(self.batch, self.worst["leak"])] = False
                changed, rows = self.changed(self.worst["leak"]), others.nonzero()[:, 0]
                return first_leaking_module(self.model, run_pack, partial(self.logits, changed), rows, rows)
            index = self.worst["error" if report.matches_stock else "reference_error"]
            alone, slots = self.alone(index), slots_of(self.batch, index)
            run_alone, rows = partial(self.logits, alone), torch.arange(len(alone.input_ids))
            if report.same and report.matches_stock and not report.matches_reference:
                index = self.worst["port_error"]
                alone, slots = self.alone(index), slots_of(self.batch, index)
                assert self.port is not None
                return self.port.first_module(partial(self.logits, alone), alone.input_ids[None])
            if not report.matches_stock:
                stock = partial(logits_alone, self.model, alone.input_ids)
                return first_leaking_module(self.model, run_alone, stock, rows, rows, tolerance=tolerance)
            there = rows + slots.start
            return first_leaking_module(self.model, run_pack, run_alone, there, rows, tolerance=tolerance)


# ---- The pack and the call


def slots_of(batch: THDBatch, index: int, rows: int | None = None) -> slice:
    """Return the slots of one sequence of a batch, or its row if there are ``rows``, one a sequence."""
    if rows == len(batch.lengths):
        return slice(index, index + 1)
    start = sum(batch.lengths[:index])
    return slice(start, start + batch.lengths[index])


def random_pack(model: nn.Module, vocab_size: int | None, lengths: Sequence[int], seed: int) -> THDBatch:
    """Build a pack of random ordinary tokens on the model's device."""
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(f"lengths={tuple(lengths)}: a leak needs at least two sequences, none empty.")
    config = text_config(getattr(model, "config", None))
    size = vocab_size or getattr(config, "vocab_size", None)
    if size is None or size < 8:
        raise ValueError(f"vocab_size={size} of {type(model).__name__}: pass the number of tokens, >= 8.")
    ordinary = _ordinary_tokens(model, size)
    host: Any = {"generator": torch.Generator().manual_seed(seed), "device": "cpu"}
    picked = [ordinary[torch.randint(len(ordinary), (n,), **host)] for n in lengths]
    firsts = torch.randperm(len(ordinary), **host)
    for i, ids in enumerate(picked):  # a leak between equal sequences may not be seen
        ids[0] = ordinary[firsts[i % len(firsts)]]
    mask = getattr(config, "mask_token_id", None)
    if isinstance(mask, int) and 0 <= mask < size:  # a model may scale a sequence by its masked tokens
        for ids in picked:
            ids[1 : len(ids) // 2 : 2] = mask
    return THDBatch.collate([{"input_ids": ids} for ids in picked]).to(embedding_of(model).weight.device)


def _ordinary_tokens(model: nn.Module, vocab_size: int) -> Tensor:
    """Return all token ids except the special ones of a config, such as an image's placeholder."""
    config = getattr(model, "config", None)
    special: set[int] = set()
    for source in (config, text_config(config)):
        for name, value in vars(source).items() if source is not None else ():
            if name.endswith(("token_id", "token_ids", "token_index")):
                special.update(value if isinstance(value, list | tuple) else [value])
    tokens = torch.arange(vocab_size)
    ids = torch.tensor([token for token in special if isinstance(token, int)], dtype=torch.int64)
    return tokens[~torch.isin(tokens, ids)]


def embedding_of(model: nn.Module) -> nn.Embedding:
    """Return the token embedding of a model; gradients are measured at its output."""
    found: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if found is None:
        found = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if not hasattr(found, "weight"):
        raise ValueError(f"{type(model).__name__} has no nn.Embedding. Give it a get_input_embeddings().")
    embedding: nn.Embedding = found
    return embedding


def default_forward(model: nn.Module) -> Forward:
    """Return the default function that calls a model on a batch."""
    named = signature(model.forward).parameters
    stock = hasattr(getattr(model, "config", None), "get_text_config")
    if not stock and "input_ids" not in named:
        return lambda model, batch: model(batch)
    takes_all = stock or any(each.kind is Parameter.VAR_KEYWORD for each in named.values())

    def forward(model: nn.Module, batch: THDBatch) -> Any:
        given = {key: value for key, value in batch.hf_kwargs().items() if takes_all or key in named}
        with packed(batch):
            return model(**given)

    return forward
