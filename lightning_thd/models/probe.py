"""A model -> a report that no sequence of a pack sees another, or an error that names the layer.

The probe runs packs of random tokens and changes one sequence at a time. A change in another sequence's
logits is a leak, and so is a gradient of one sequence's logits at another's inputs. A sequence must give the
same result in its own pack, and with transformers' eager attention. A trailing pad must not change gradients.
Two more checks look for leaks only: one in training mode, and one in a longer pack. A loss that is given too
is checked as ``probe_loss`` says.
Legend: T slots in a pack, V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd._checks import described, flags, host_ints, instance, real_number, whole_number
from lightning_thd._find import text_config
from lightning_thd._pages import see
from lightning_thd.batch import THDBatch
from lightning_thd.models.pack import packed
from lightning_thd.models.preparing import prepare_if_asked
from lightning_thd.models.probe_loss import LossFinding, LossFunction, Tokens, look_at_loss
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
    positions_of,
    refuse_without_forward,
    seed_generators,
    undisturbed,
    working_dtype,
)
from lightning_thd.models.probe_port import Port, Reference
from lightning_thd.models.probe_report import PackingLeakError, PackingReport
from lightning_thd.models.probe_training import as_in_training, kept_values
from lightning_thd.warnings import THDWarning, warn

Forward = Callable[[nn.Module, THDBatch], Any]
LENGTHS = (7, 1, 16, 3, 8)

# Tolerances relative to the largest logit or gradient. Leak checks compare runs of equal shapes, which differ
# only by the order of sums in expert kernels. Error checks compare different shapes, which round differently.
_LEAK: dict[torch.dtype, float] = {torch.float64: 1e-12, torch.float32: 1e-6}
_ERROR: dict[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-4}
# A right model leaks exactly 0 in half precision too, because the same operators compute the slots that did
# not change. Only kernels that sort tokens by expert may round these slots differently, by the resolution of
# the dtype. So a leak above the bound of fp32 is measured again in fp32, and only a model that cannot run in
# fp32 is judged by this bound.
_HALF_LEAK = 1e-2
_HALF_ERROR = 5e-2
# Slots of the longer pack: more for models that are small enough for a CPU, or on a GPU.
_FAR = 512
_FAR_IF_LARGE = 128
_LARGE = 5_000_000  # parameters
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
    loss_fn: LossFunction | None = None,
) -> PackingReport:
    """Check whether any sequence of a pack sees another, whether a port is exact, and your loss right.

    During the check the model is in ``eval()``, and parameters that are all zero, or all one value whose size
    is below 1e-3, hold small noise. Leaks are also looked for in ``train()`` without dropout and, if
    ``lengths`` is left out, in a pack of about 500 tokens, or of 128 for a large model on a CPU. Batch norms
    that average over the pack in the model's present mode fail the check. Not looked at are longer packs, and
    what is behind a gate that is nearly closed in another way, such as a buffer of zeros or a sigmoid of -20.
    For S sequences the check takes about S + 9 forward passes of ``sum(lengths)`` tokens, three of the longer
    pack, and S + 3 backward passes with ``grad``.

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
        loss_fn: your own loss, ``loss_fn(model, batch)``. Some 50 to 80 more forward passes of at most 52
            tokens, in ``train()`` without dropout, change single labels and measure which logits are scored,
            and what a target weighs. Refused are labels that are not shifted, or shifted twice, or scored
            across two documents; means of means; and denominators that count padding or ignored targets. A
            loss that reads no scale of the batch is warned about.

    Returns:
        The report, which prints as a table. If a model in half precision leaks between 1e-6 and 1e-2, or
        differs without a leak and ``tolerance`` is None, a second run in fp32 decides, unless it fails or
        there are over 3e8 weights in half precision.

    Raises:
        PackingLeakError: if a check fails and ``raise_on_leak``; it names the first wrong module, if found.
        ValueError: for fewer than two lengths, a length of 0, an unknown vocabulary, or all logits zero.
    """
    instance(model, "model", nn.Module, advice="Pass the model itself.")
    lengths = host_ints(lengths, "lengths", advice="Pass at least two lengths.").tolist()
    check_options(vocab_size, tolerance)
    whole_number(seed, "seed")
    flags(grad=grad, raise_on_leak=raise_on_leak, thorough=thorough)
    if forward is None:
        refuse_without_forward(model, "model", otherwise=", or pass forward=, which calls it on a batch")
    prepare_if_asked(model)
    run = forward or default_forward(model)
    port: Port | None = None
    if reference is not None:
        port = Port(model, reference)
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(
            f"loss_fn is {described(loss_fn)}; wanted a function of model and batch that returns the loss."
        )
    are_default = tuple(lengths) == LENGTHS
    if are_default:
        lengths = _default_lengths(model, run, vocab_size, seed, port, thorough=thorough)

    norms = averaging_norms(model)

    def measure() -> _Probe:
        with calls_noted(norms) as names_of_called:
            probe = _Probe(model, run, batch, grad=grad)
        probe.measured["batch_norms"] = tuple(dict.fromkeys(names_of_called))
        if thorough:
            probe.compare_with_stock(has_reference=port is not None)
            probe.add_a_pad()
        if port is not None:
            probe.compare_with_reference(port)
        probe.look_in_training(modes)
        if are_default:
            probe.look_further(vocab_size, seed)
        return probe

    with ExitStack() as changes:
        modes = changes.enter_context(undisturbed(model, grad=grad))
        if port is not None:
            changes.enter_context(port.undisturbed(grad=grad))
        if port is None or port.shares_weights:
            changes.enter_context(no_zero_weights(model))
        if thorough and port is None:
            changes.enter_context(lowered_limits(model))

        batch = random_pack(model, vocab_size, lengths, seed)
        probe = measure()
        report = _judged(probe, tolerance)
        may_be_rounding = not report.ok and not report.leaks and tolerance is None
        if report.may_leak or may_be_rounding:
            report = _without_rounding(model, measure, report, tolerance, rounded=probe.is_half)
        elif probe.is_half and not report.leaks:
            report = replace(report, leak_tolerance=_LEAK[torch.float32])

        if loss_fn is not None:
            report = _with_loss(report, model, loss_fn, probe, modes)

    if raise_on_leak and not report.ok:
        raise PackingLeakError(report)
    return report


def _with_loss(
    report: PackingReport,
    model: nn.Module,
    loss_fn: LossFunction,
    probe: _Probe,
    modes: dict[nn.Module, bool],
) -> PackingReport:
    """Check a loss on random tokens, and return the report with what was found."""
    if not report.ok:  # a target that sees other documents weighs what they hold
        return replace(report, skipped=(*report.skipped, "the loss: the model has to be right first"))
    ids = torch.unique(probe.batch.input_ids).cpu()
    are_next = probe.width > int(ids.max())  # a classifier has fewer logits than there are tokens
    labels = ids if are_next else torch.arange(probe.width)
    tokens = Tokens(ids=ids, labels=labels, are_next=are_next)
    finding = look_at_loss(
        model,
        loss_fn,
        tokens,
        forward=probe.logits,
        embedding=embedding_of(model),
        modes=modes,
        most=_MANY,
    )
    return with_finding(report, finding, "loss_fn")


def check_step(
    report: PackingReport,
    module: nn.Module,
    step: LossFunction,
    tokens: Tokens,
    *,
    model: nn.Module,
    forward: Forward | None = None,
    what: str,
    several: bool,
) -> PackingReport:
    """Check the loss of a module's step, and return the report of the module's model with what was found.

    A step that fails on small packs is not checked, because it may need what only its own data has.

    Args:
        report: the report of the model, which passed.
        module: the module, which holds the model.
        step: a function of module and batch that returns the loss.
        tokens: the ids and labels of the packs.
        model: the model.
        forward: calls the model on a batch, as for ``check_packing``.
        what: the name of the step in messages.
        several: whether an optimizer step may have several microbatches.
    """
    run = forward or default_forward(model)
    with undisturbed(module, grad=False) as modes, no_zero_weights(module):
        try:
            finding = look_at_loss(
                module,
                step,
                tokens,
                forward=lambda batch: logits_of(run(model, batch)),
                embedding=embedding_of(model),
                modes=modes,
                most=_MANY,
                several=several,
            )
        except Exception as error:
            reason = f"the loss: it raised {type(error).__name__} on a small pack"
            finding = LossFinding(skipped=(reason,))
    report = with_finding(report, finding, what)
    if not report.ok:
        raise PackingLeakError(report)
    return report


def with_finding(report: PackingReport, finding: LossFinding, what: str) -> PackingReport:
    """Return a report with what was found of a loss that messages call ``what``, and warn of doubts."""
    for advice in finding.advice:
        warn(f"{what} {advice}. {see('losses')}", THDWarning)
    return replace(
        report,
        loss=finding.kind,
        loss_fault=None if finding.fault is None else f"{what} {finding.fault}",
        skipped=(*report.skipped, *finding.skipped),
    )


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
    if not _runs_on_one_token(model, run, vocab_size, seed):
        lengths = tuple(length for length in LENGTHS if length > 1)

    if port is not None:
        return (*lengths, *port.lengths_to_reach(max(LENGTHS)))
    if thorough:
        return (*lengths, *lengths_to_reach(model, max(LENGTHS)))
    return lengths


def _runs_on_one_token(model: nn.Module, run: Forward, vocab_size: int | None, seed: int) -> bool:
    """Return whether a model runs on a sequence of one token."""
    with undisturbed(model, grad=False):
        ids = random_pack(model, vocab_size, (1, 1), seed).input_ids[:1]
        single = THDBatch.collate([{"input_ids": ids.cpu()}]).to(ids.device)
        try:
            run(model, single)
        except Exception:  # the checks themselves show whether the model fails on other lengths too
            return False
    return True


def _judged(probe: _Probe, tolerance: float | None) -> PackingReport:
    """Return a probe's report; only a failed one looks for the first wrong module, which takes more runs."""
    report = probe.report(tolerance)
    if report.ok:
        return report
    return probe.report(tolerance, module=probe.culprit(report))


def _without_rounding(
    model: nn.Module,
    measure: Callable[[], _Probe],
    half: PackingReport,
    tolerance: float | None,
    *,
    rounded: bool,
) -> PackingReport:
    """Measure a model in fp32, because rounding may route tokens to other experts, and return its report.

    If the model cannot run in fp32, the report of half precision stays, and says which leak was not judged.
    """
    found = f"a leak of {half.largest_leak:.1e}" if half.may_leak else "differs"
    probe: _Probe | None = None
    with in_fp32(model, most=_MANY, rounded=rounded) as precise:
        if precise:
            try:
                probe = measure()
            except Exception:  # a kernel may exist only in half precision; keep the first measurement
                probe = None
        if probe is not None and not probe.is_half:
            probe.skipped.append(f"rounding of half precision: {found}, so measured in fp32")
            return _judged(probe, tolerance)

    if not half.may_leak:
        return half
    reason = f"whether {found} is rounding of half precision: the model did not run in fp32"
    return replace(half, skipped=(*half.skipped, reason))


class _Probe:
    """The model runs of one leak check, and the batches they use."""

    def __init__(self, model: nn.Module, run: Forward, batch: THDBatch, *, grad: bool) -> None:
        self.model = model
        self.name = type(model).__name__
        self.run = run
        self.batch = batch
        self.grad = grad
        self.port: Port | None = None
        self.inputs: Tensor | None = None  # the embedding's output in the latest run with gradients
        self.dtype = torch.float32
        self.width = 0  # the size of a row of logits
        self.measured: dict[str, Any] = {
            "leak": 0.0,
            "error": 0.0,
            "gradient_leak": None,
            "gradient_error": None,
        }
        self.worst: dict[str, int] = {}  # the sequence at which each number was measured
        self.leaking: str | None = None  # the first module that leaks in training mode or in a longer pack
        self.skipped: list[str] = []

        self._measure()

    def keep(self, name: str, error: float, index: int) -> None:
        """Keep an error of a sequence if it is the largest of its kind; NaN counts as the largest."""
        largest = self.measured.get(name) or 0.0
        is_first = name not in self.worst
        is_larger = not math.isnan(largest) and not error <= largest  # also if the error is NaN
        if is_first or is_larger:
            self.measured[name] = error
            self.worst[name] = index

    @property
    def is_half(self) -> bool:
        """Return whether the model computes in half precision."""
        return self.dtype not in _LEAK

    def changed(self, index: int) -> THDBatch:
        """Return the pack with every token of one sequence replaced."""
        return with_others(self.batch, [index])

    def alone(self, index: int) -> THDBatch:
        """Return one sequence as its own pack."""
        ids = self.batch.input_ids[slots_of(self.batch, index)]
        return THDBatch.collate([{"input_ids": ids.cpu()}]).to(ids.device)

    def logits(self, batch: THDBatch) -> Tensor:
        """Return the model's logits of a pack: a row for each slot, or for each sequence."""
        logits = logits_of(self.run(self.model, batch))
        num_slots = len(batch.input_ids)
        num_sequences = len(batch.lengths)
        # A classifier gives a trailing pad a row too.
        if len(logits) not in (num_slots, num_sequences, num_sequences + 1):
            raise ValueError(
                f"{self.name} gives {len(logits)} rows for {num_slots} slots of {num_sequences} sequences. "
                "Pass a forward= that gives one row for each."
            )

        if len(logits) == num_slots:
            return logits
        return logits[:num_sequences]

    def _measure(self) -> None:
        """Run the pack, the pack with each sequence changed, and each sequence alone."""
        with self._inputs_watched():
            whole = self.logits(self.batch)
            inputs = self.inputs
            self.dtype = working_dtype(self.model, whole)
            self.width = whole.shape[-1]
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
        """Compare a sequence of the pack, whose logits are ``whole``, with the same sequence alone."""
        slots = slots_of(self.batch, index)
        rows = slots_of(self.batch, index, rows=len(whole))
        alone = self.logits(self.alone(index))
        difference = alone.detach() - whole.detach()[rows]
        self.keep("error", difference.abs().max().item() / scale, index)
        if not self.grad:
            return

        assert inputs is not None
        assert self.inputs is not None
        weights = torch.randn_like(alone)
        is_last = index == len(self.batch.lengths) - 1
        (packed_grad,) = torch.autograd.grad((whole[rows] * weights).sum(), inputs, retain_graph=not is_last)
        (alone_grad,) = torch.autograd.grad((alone * weights).sum(), self.inputs)
        packed_grad = packed_grad.flatten(0, -2)
        alone_grad = alone_grad.flatten(0, -2)

        largest = max(alone_grad.abs().max().item(), torch.finfo(alone_grad.dtype).tiny)
        self.keep("gradient_error", (packed_grad[slots] - alone_grad).abs().max().item() / largest, index)
        packed_grad[slots] = 0  # what is left reaches other sequences
        self.keep("gradient_leak", packed_grad.abs().max().item() / largest, index)

    def look_in_training(self, modes: dict[nn.Module, bool]) -> None:
        """Look for leaks in training mode, where layers may take other branches."""
        if kept_values(self.model) > _MANY:
            self.skipped.append(f"training mode: {kept_values(self.model):,} values of buffers to restore")
            return

        with warnings.catch_warnings(), as_in_training(self.model, modes, most=_MANY), torch.no_grad():
            warnings.simplefilter("ignore")  # such as that checkpoints without gradients do nothing
            try:
                leak = self._leak_between("training_leak", self.batch)
            except Exception as error:  # the model may need targets, or refuse its dropout
                self.skipped.append(f"training mode: {type(error).__name__} in train()")
                return

            if not leak <= _LEAK[torch.float32] and self._is_random():
                self.measured["training_leak"] = None
                self.skipped.append("training mode: it draws random numbers beside dropout")

    def _is_random(self) -> bool:
        """Return whether the logits of a pack depend on the random state."""
        logits: list[Tensor] = []
        for seed in range(2):
            seed_generators(self.model, seed)
            logits.append(self.logits(self.batch))
        return not torch.equal(*logits)

    def look_further(self, vocab_size: int | None, seed: int) -> None:
        """Look for leaks over more slots: between long sequences, or many short ones if positions may end."""
        size = sum(parameter.numel() for parameter in self.model.parameters())
        on_cpu = self.batch.input_ids.device.type == "cpu"
        slots = _FAR_IF_LARGE if on_cpu and size > _LARGE else _FAR
        if slots <= len(self.batch.input_ids):
            return

        # A position beyond a table ends a process on a GPU, and is an error on a CPU.
        longest = (slots - 17) // 2
        positions = positions_of(self.model)
        if positions is not None:
            longest = min(longest, positions)
        elif not on_cpu:
            longest = 0

        lengths: tuple[int, ...]
        choices: list[tuple[int, ...]] = []
        checked = [length for length in LENGTHS if length in self.batch.lengths]
        while longest > max(LENGTHS):
            lengths = (longest, checked[0], 16, longest)
            choices.append(lengths * max(slots // sum(lengths), 1))
            longest //= 2
        choices.append(tuple(checked) * (slots // sum(checked)))

        for lengths in choices:
            try:
                with torch.no_grad():
                    self._leak_between("far_leak", random_pack(self.model, vocab_size, lengths, seed))
            except Exception:
                continue
            self.measured["far_lengths"] = lengths
            return
        self.skipped.append("packs of more tokens: the model did not run on them")

    def _leak_between(self, name: str, batch: THDBatch) -> float:
        """Change every second sequence of a batch, then the others; keep and return the largest leak."""

        def run(batch: THDBatch) -> Tensor:
            seed_generators(self.model, 0)
            return self.logits(batch)

        whole = run(batch)
        scale = max(whole.abs().max().item(), torch.finfo(torch.float32).tiny)
        num_sequences = len(batch.lengths)
        for start in range(2):
            others = list(range(start, num_sequences, 2))
            changed = with_others(batch, others)
            moved = (run(changed) - whole).abs().amax(-1)
            for index in others:
                moved[slots_of(batch, index, rows=len(moved))] = 0
            leak = moved.max().item() / scale
            self.keep(name, leak, start)
            if self.leaking is None and not leak <= _LEAK.get(self.dtype, _HALF_LEAK):
                is_kept = torch.ones(len(batch.input_ids), dtype=torch.bool)
                for index in others:
                    is_kept[slots_of(batch, index)] = False
                rows = is_kept.nonzero()[:, 0]
                runs = (partial(run, batch), partial(run, changed))
                self.leaking = first_leaking_module(self.model, *runs, rows, rows)
        return float(self.measured[name])

    def compare_with_stock(self, *, has_reference: bool) -> None:
        """Run every sequence under stock eager attention, shortest first."""
        if not attention_configs(self.model):  # only models of transformers have a second attention
            if not has_reference:
                self.skipped.append("what it was ported from: pass that model as reference=")
            return

        ids = self.batch.input_ids
        lengths = self.batch.lengths
        # Dynamic ropes keep the longest length that they have seen.
        shortest_first = sorted(range(len(lengths)), key=lambda index: lengths[index])
        stock: dict[int, Tensor] = {}

        try:
            with torch.no_grad():
                for index in shortest_first:
                    stock[index] = logits_alone(self.model, ids[slots_of(self.batch, index)])
        except Exception as error:  # the family may need more arguments, such as images or labels
            self.skipped.append(f"stock eager attention: {type(error).__name__} in a plain call")
            return

        with torch.no_grad():
            whole = self.logits(self.batch)

        if any(logits.shape[-1] != whole.shape[-1] for logits in stock.values()):
            self.skipped.append("stock eager attention: its logits are not what forward() returns")
            return

        scale = max(logits.abs().max().item() for logits in stock.values())
        for index, logits in stock.items():
            rows = slots_of(self.batch, index, rows=len(whole))
            self.keep("reference_error", (whole[rows] - logits).abs().max().item() / scale, index)

    def compare_with_reference(self, port: Port) -> None:
        """Run every sequence through the reference, and compare its logits and all weights' gradients."""
        self.port = port
        self.skipped += port.skipped
        whole = self.logits(self.batch)
        references = [port.logits(ids[None]) for ids in self.batch.unpack(self.batch.input_ids)]
        rows_of = [slots_of(self.batch, index, rows=len(whole)) for index in range(len(references))]
        largest_logit = max(logits.detach().abs().max().item() for logits in references)
        scale = max(largest_logit, torch.finfo(torch.float32).tiny)

        for index, (rows, logits) in enumerate(zip(rows_of, references, strict=True)):
            ported = whole[rows]
            if ported.shape != logits.shape:
                raise ValueError(
                    f"reference gives logits {list(logits.shape)} for a sequence of which {self.name} gives "
                    f"{list(ported.shape)}. Return one row for each token, or one for the sequence."
                )
            self.keep("port_error", (ported - logits).detach().abs().max().item() / scale, index)

        weights = self._trained()
        if not weights or not self.grad or not port.shares_weights or sum(p.numel() for p in weights) > _MANY:
            return

        factors = torch.randn_like(whole)
        total = (whole * factors).sum()
        totals = [(logits * factors[rows]).sum() for rows, logits in zip(rows_of, references, strict=True)]
        ported_grads: Any = torch.autograd.grad(total, weights, allow_unused=True)
        reference_grads: Any = torch.autograd.grad(torch.stack(totals).sum(), weights, allow_unused=True)

        zero = torch.zeros((), device=weights[0].device)  # the gradient of a weight that one of them ignores

        for ported_grad, reference_grad in zip(ported_grads, reference_grads, strict=True):
            if ported_grad is None and reference_grad is None:
                continue
            ported_grad = zero if ported_grad is None else ported_grad
            reference_grad = zero if reference_grad is None else reference_grad
            largest = max(reference_grad.abs().max().item(), 1e-3 * scale, 1e-30)
            self.keep("port_gradient", (ported_grad - reference_grad).abs().max().item() / largest, 0)

    def add_a_pad(self) -> None:
        """Compare the gradients of parameters with and without a trailing pad."""
        if not self.grad:
            return

        weights = self._trained()
        size = sum(p.numel() for p in weights)
        if not weights or size > _MANY:
            self.skipped.append(f"gradients with a trailing pad: {size:,} parameters")
            return

        slots = sum(self.batch.lengths)
        rows = [{"input_ids": ids} for ids in self.batch.unpack(self.batch.input_ids.cpu())]
        padded_batch = THDBatch.collate(rows, pad_to=slots + _PAD).to(self.batch.input_ids.device)
        plain = self.logits(self.batch)[:slots]
        padded = self.logits(padded_batch)[:slots]
        factors = torch.randn_like(plain)
        plain_grads = torch.autograd.grad((plain * factors).sum(), weights, allow_unused=True)
        padded_grads = torch.autograd.grad((padded * factors).sum(), weights, allow_unused=True)

        pairs = [
            (plain_grad, padded_grad)
            for plain_grad, padded_grad in zip(plain_grads, padded_grads, strict=True)
            if plain_grad is not None and padded_grad is not None
        ]
        largest = max((plain_grad.abs().max().item() for plain_grad, _ in pairs), default=0.0)

        for plain_grad, padded_grad in pairs:
            scale = max(plain_grad.abs().max().item(), 1e-3 * largest, 1e-30)
            self.keep("pad_error", (plain_grad - padded_grad).abs().max().item() / scale, 0)

    def _trained(self) -> list[nn.Parameter]:
        """List the parameters that can have a gradient."""
        return [p for p in self.model.parameters() if p.requires_grad and p.is_floating_point()]

    @contextmanager
    def _inputs_watched(self) -> Generator[None]:
        """Make the embedding's output a leaf in this context, so that its gradient can be read."""

        def cut(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return output
            self.inputs = output.detach().requires_grad_()
            return self.inputs.clone()  # some models change the output in place

        if not self.grad:
            yield
            return

        with embedding_of(self.model).register_forward_hook(cut):
            yield

    def report(self, tolerance: float | None, *, module: str | None = None) -> PackingReport:
        """Return the measurements as a report; ``module`` is the first wrong module."""
        config: Any = getattr(self.model, "config", None)
        if tolerance is None:
            tolerance = _ERROR.get(self.dtype, _HALF_ERROR)
        return PackingReport(
            model=self.name,
            attention=getattr(config, "_attn_implementation", None),
            layers=getattr(text_config(config), "num_hidden_layers", None),
            lengths=self.batch.lengths,
            leak_tolerance=_LEAK.get(self.dtype, _HALF_LEAK),
            tolerance=tolerance,
            skipped=tuple(self.skipped),
            module=module,
            **self.measured,
        )

    def culprit(self, report: PackingReport) -> str | None:
        """Return the name for ``PackingReport.module``: a batch norm, or the first module that differs."""
        if report.batch_norms and report.same and not report.leaks:
            return report.batch_norms[0]

        with torch.no_grad():
            if report.leak > report.leak_tolerance:
                return self._first_to_leak(self.worst["leak"])
            if self.leaking is not None:
                return self.leaking
            if report.same and report.matches_stock and not report.matches_reference:
                assert self.port is not None
                alone = self.alone(self.worst["port_error"])
                return self.port.first_module(partial(self.logits, alone), alone.input_ids[None])
            if not report.matches_stock:
                return self._first_unlike_stock(self.worst["reference_error"], report.tolerance)
            return self._first_unlike_alone(self.worst["error"], report.tolerance)

    def _first_to_leak(self, index: int) -> str | None:
        """Return the first module whose outputs for other sequences change if one sequence does."""
        is_other = torch.ones(self.batch.input_ids.shape[-1], dtype=torch.bool)
        is_other[slots_of(self.batch, index)] = False
        rows = is_other.nonzero()[:, 0]
        run_pack = partial(self.logits, self.batch)
        run_changed = partial(self.logits, self.changed(index))
        return first_leaking_module(self.model, run_pack, run_changed, rows, rows)

    def _first_unlike_stock(self, index: int, tolerance: float) -> str | None:
        """Return the first module that differs between our attention and stock eager attention."""
        alone = self.alone(index)
        rows = torch.arange(len(alone.input_ids))
        run_alone = partial(self.logits, alone)
        run_stock = partial(logits_alone, self.model, alone.input_ids)
        return first_leaking_module(self.model, run_alone, run_stock, rows, rows, tolerance=tolerance)

    def _first_unlike_alone(self, index: int, tolerance: float) -> str | None:
        """Return the first module that differs between a sequence in the pack and alone."""
        alone = self.alone(index)
        rows = torch.arange(len(alone.input_ids))
        rows_in_pack = rows + slots_of(self.batch, index).start
        run_pack = partial(self.logits, self.batch)
        run_alone = partial(self.logits, alone)
        return first_leaking_module(self.model, run_pack, run_alone, rows_in_pack, rows, tolerance=tolerance)


# ---- The pack and the call


def slots_of(batch: THDBatch, index: int, rows: int | None = None) -> slice:
    """Return the slots of one sequence of a batch, or its row if there are ``rows``, one a sequence."""
    if rows == len(batch.lengths):
        return slice(index, index + 1)
    start = sum(batch.lengths[:index])
    return slice(start, start + batch.lengths[index])


def with_others(batch: THDBatch, indices: Sequence[int]) -> THDBatch:
    """Return a batch with every token of some of its sequences replaced."""
    ids = batch.input_ids.clone()
    ids_of_pack = torch.unique(ids)
    for index in indices:
        slots = slots_of(batch, index)
        # Each token becomes the next larger id of the pack, the largest becomes the smallest: no id is new.
        rank = torch.searchsorted(ids_of_pack, ids[slots])
        ids[slots] = ids_of_pack[(rank + 1) % len(ids_of_pack)]
    return batch.replace(input_ids=ids)


def random_pack(model: nn.Module, vocab_size: int | None, lengths: Sequence[int], seed: int) -> THDBatch:
    """Build a pack of random ordinary tokens on the model's device."""
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(f"lengths={tuple(lengths)}: a leak needs at least two sequences, none empty.")

    config = text_config(getattr(model, "config", None))
    size = vocab_size or getattr(config, "vocab_size", None)
    if size is None or size < 8:
        raise ValueError(f"vocab_size={size} of {type(model).__name__}: pass the number of tokens, >= 8.")

    tokens = _ordinary_tokens(model, size)
    on_host: Any = {"generator": torch.Generator().manual_seed(seed), "device": "cpu"}
    sequences = [tokens[torch.randint(len(tokens), (length,), **on_host)] for length in lengths]

    # A leak between equal sequences may not be seen, so their first tokens differ.
    first_tokens = tokens[torch.randperm(len(tokens), **on_host)]

    for index, ids in enumerate(sequences):
        ids[0] = first_tokens[index % len(first_tokens)]

    mask = getattr(config, "mask_token_id", None)
    if isinstance(mask, int) and 0 <= mask < size:  # a model may scale a sequence by its masked tokens
        for ids in sequences:
            ids[1 : len(ids) // 2 : 2] = mask

    batch = THDBatch.collate([{"input_ids": ids} for ids in sequences])
    return batch.to(embedding_of(model).weight.device)


def _ordinary_tokens(model: nn.Module, vocab_size: int) -> Tensor:
    """Return all token ids except the special ones of a config, such as an image's placeholder."""
    config = getattr(model, "config", None)
    special: set[int] = set()
    for source in (config, text_config(config)):
        if source is None:
            continue
        for name, value in vars(source).items():
            if name.endswith(("token_id", "token_ids", "token_index")):
                special.update(value if isinstance(value, list | tuple) else [value])

    tokens = torch.arange(vocab_size, device="cpu")
    ids = torch.tensor(
        [token for token in special if isinstance(token, int)], dtype=torch.int64, device="cpu"
    )
    return tokens[~torch.isin(tokens, ids)]


def embedding_of(model: nn.Module) -> nn.Embedding:
    """Return the token embedding of a model; gradients are measured at its output."""
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if embedding is None:
        embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
        embedding = next(embeddings, None)
    if not hasattr(embedding, "weight"):
        raise ValueError(f"{type(model).__name__} has no nn.Embedding. Give it a get_input_embeddings().")
    return embedding  # type: ignore[no-any-return]


def default_forward(model: nn.Module) -> Forward:
    """Return the default function that calls a model on a batch."""
    parameters = signature(model.forward).parameters
    from_transformers = hasattr(getattr(model, "config", None), "get_text_config")
    if not from_transformers and "input_ids" not in parameters:
        return _call_on_batch

    has_kwargs = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    takes_all = from_transformers or has_kwargs

    def forward(model: nn.Module, batch: THDBatch) -> Any:
        kwargs = batch.hf_kwargs()
        if not takes_all:
            kwargs = {name: value for name, value in kwargs.items() if name in parameters}
        with packed(batch):
            try:
                return model(**kwargs)
            except TypeError as error:
                _explain_arguments(model, error, **kwargs)
                raise

    return forward


def _call_on_batch(model: nn.Module, batch: THDBatch) -> Any:
    """Call a model on a batch; of one that takes tensors in its place, say how to port it."""
    try:
        return model(batch)
    except (TypeError, AttributeError) as error:
        _explain_arguments(model, error, batch)
        if THDBatch.__name__ not in str(error):
            raise
        reason = str(error).rstrip(".")
        raise ValueError(
            f"{type(model).__name__} was called as model(batch) with a THDBatch, and failed: {reason}. Port "
            "it to packs: take batch.input_ids as ids and batch.position_ids as positions, and call "
            "varlen_attention(q, k, v, batch.boundaries) as attention. Or pass forward=, a function of model "
            "and batch. check_packing compares with the unported model if it is given as reference=. See "
            "'Your own module, your own model' in the documentation."
        ) from error


def _explain_arguments(model: nn.Module, error: Exception, *args: Any, **kwargs: Any) -> None:
    """Raise with what to pass, if the model's forward takes other arguments than it was called with."""
    call = signature(model.forward)
    try:
        call.bind(*args, **kwargs)
    except TypeError as mismatch:
        called = "model(batch)" if args else f"model({', '.join(f'{name}=...' for name in kwargs)})"
        names = ", ".join(call.parameters)
        raise ValueError(
            f"{type(model).__name__} was called as {called}, but its forward takes ({names}): {mismatch}. "
            "Pass forward=, a function of model and batch that returns logits, such as "
            "forward=lambda model, batch: model(batch.input_ids, batch.boundaries)."
        ) from error
