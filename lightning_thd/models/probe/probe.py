"""A model -> proof, or the name of the layer, that no sequence of a pack sees another.

Packs of random tokens are run; one sequence is changed at a time, and what moves elsewhere is leakage. So is
a gradient that reaches the inputs of another sequence. And every sequence run alone must give what it gave
in the pack.

Legend: T slots in a pack, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd.batch import THDBatch
from lightning_thd.models.pack import packed
from lightning_thd.models.probe.report import PackingLeakError, PackingReport
from lightning_thd.models.probe.trace import first_leaking_module

Forward = Callable[[nn.Module, THDBatch], Any]

# Relative to the largest logit. A leak is judged between two runs of the same shapes, so only the order of
# sums in expert kernels remains; packed against alone differs by the rounding of the dtype over the depth of
# a model.
_LEAK: dict[torch.dtype, float] = {torch.float64: 1e-12, torch.float32: 1e-6}
_ERROR: dict[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_LEAK, _HALF_ERROR = 1e-2, 5e-2
_LENGTHS = (7, 1, 16, 3, 8)


def check_packing(
    model: nn.Module,
    vocab_size: int | None = None,
    lengths: Sequence[int] = _LENGTHS,
    grad: bool = True,
    *,
    forward: Forward | None = None,
    tolerance: float | None = None,
    raise_on_leak: bool = True,
    seed: int = 0,
) -> PackingReport:
    """Run packs through a model and see whether any sequence sees another.

    The model is put in ``eval()`` meanwhile; parameters and their gradients stay as they are. It takes about
    three forwards a sequence of ``sum(lengths)`` tokens, and two backwards with ``grad``.

    Args:
        model: a Hugging Face causal LM, or any model that ``forward`` can call.
        vocab_size: V; from the config of the model when absent.
        lengths: of the sequences of the pack, at least two; include 1, and more than the window of the model.
        grad: check gradients of the inputs too.
        forward: ``forward(model, batch)`` gives logits ``[T, V]`` or ``[1, T, V]``; by default
            ``model(**batch.hf_kwargs()).logits`` for a model with a transformers config, else
            ``model(batch)``.
        tolerance: what packed and alone may differ by, relative to the largest logit; by the dtype when
            absent.
        raise_on_leak: raise rather than return a report that is not ok.
        seed: of the random tokens.

    Returns:
        The report.

    Raises:
        PackingLeakError: naming the first module that leaks.
        ValueError: for fewer than two lengths, or an unknown vocabulary.
    """
    batch = _random_pack(model, vocab_size, lengths, seed)
    run = forward or _default_forward(model)
    with _undisturbed(model):
        probe = _Probe(model, run, batch, grad=grad)
        report = probe.report(tolerance)
        if not report.ok:
            report = probe.report(tolerance, module=probe.culprit(report))
    if raise_on_leak and not report.ok:
        raise PackingLeakError(report)
    return report


class _Probe:
    """The runs of one check; kept apart so that the measured tensors have names."""

    def __init__(self, model: nn.Module, run: Forward, batch: THDBatch, *, grad: bool) -> None:
        self.model = model
        self.run = run
        self.batch = batch
        self.grad = grad
        self.inputs: Tensor | None = None
        self.leak, self.error, self.dtype = 0.0, 0.0, torch.float32
        self.leaking, self.differing = 0, 0
        self.gradient_leak: float | None = 0.0 if grad else None
        self.gradient_error: float | None = 0.0 if grad else None
        self._measure()

    def changed(self, index: int) -> THDBatch:
        """The pack with every token of one sequence replaced."""
        ids = self.batch.input_ids.clone()
        own = _slots(self.batch, index)
        spare = torch.unique(ids)
        # Shift within the tokens in use: never a special token, always another one.
        rank = torch.searchsorted(spare, ids[own])
        ids[own] = spare[(rank + 1) % len(spare)]
        return self.batch.replace(input_ids=ids)

    def alone(self, index: int) -> THDBatch:
        """One sequence as a pack of its own."""
        ids = self.batch.input_ids[_slots(self.batch, index)]
        return THDBatch.collate([{"input_ids": ids.cpu()}]).to(ids.device)

    def logits(self, batch: THDBatch) -> Tensor:
        """Run the model; ``[T, V]``."""
        output = self.run(self.model, batch)
        output = getattr(output, "logits", output)
        if isinstance(output, tuple):
            output = output[0]
        logits: Tensor = output[0] if output.ndim == 3 else output
        return logits

    def _measure(self) -> None:
        with torch.set_grad_enabled(self.grad), self._inputs_watched():
            whole = self.logits(self.batch)
            inputs = self.inputs
            self.dtype = whole.dtype
            scale = whole.detach().abs().max().item()
            for index in range(len(self.batch.lengths)):
                self._perturb(index, whole.detach(), scale)
                self._compare(index, whole, inputs, scale)

    def _perturb(self, index: int, whole: Tensor, scale: float) -> None:
        with torch.no_grad():
            moved = (self.logits(self.changed(index)) - whole).abs().amax(-1)
        moved[_slots(self.batch, index)] = 0
        leak = moved.max().item() / scale
        if not leak <= self.leak:
            self.leak, self.leaking = leak, index

    def _compare(self, index: int, whole: Tensor, inputs: Tensor | None, scale: float) -> None:
        own = _slots(self.batch, index)
        alone = self.logits(self.alone(index))
        error = (alone.detach() - whole.detach()[own]).abs().max().item() / scale
        if not error <= self.error:
            self.error, self.differing = error, index
        if not self.grad:
            return
        assert inputs is not None
        assert self.inputs is not None
        weights = torch.randn_like(alone)
        last = index == len(self.batch.lengths) - 1
        (packed_grad,) = torch.autograd.grad((whole[own] * weights).sum(), inputs, retain_graph=not last)
        (alone_grad,) = torch.autograd.grad((alone * weights).sum(), self.inputs)
        packed_grad, alone_grad = packed_grad.flatten(0, -2), alone_grad.flatten(0, -2)
        largest = alone_grad.abs().max().item()
        error = (packed_grad[own] - alone_grad).abs().max().item() / largest
        packed_grad[own] = 0
        leak = packed_grad.abs().max().item() / largest
        self.gradient_error = max(self.gradient_error or 0.0, error)
        self.gradient_leak = max(self.gradient_leak or 0.0, leak)

    @contextmanager
    def _inputs_watched(self) -> Generator[None]:
        """Make the output of the embedding a leaf of its own, whose gradient can be asked for."""
        if not self.grad:
            yield
            return

        def cut(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return output
            self.inputs = output.detach().requires_grad_()
            return self.inputs

        handle = _embedding(self.model).register_forward_hook(cut)
        try:
            yield
        finally:
            handle.remove()

    def report(self, tolerance: float | None, *, module: str | None = None) -> PackingReport:
        config: Any = getattr(self.model, "config", None)
        return PackingReport(
            model=type(self.model).__name__,
            attention=getattr(config, "_attn_implementation", None),
            layers=getattr(_text_config(config), "num_hidden_layers", None),
            lengths=self.batch.lengths,
            leak=self.leak,
            gradient_leak=self.gradient_leak,
            error=self.error,
            gradient_error=self.gradient_error,
            leak_tolerance=_LEAK.get(self.dtype, _HALF_LEAK),
            tolerance=_ERROR.get(self.dtype, _HALF_ERROR) if tolerance is None else tolerance,
            module=module,
        )

    def culprit(self, report: PackingReport) -> str | None:
        """Run the two batches that differ once more, looking at every module."""
        with torch.no_grad():
            if report.leak > report.leak_tolerance:
                own = _slots(self.batch, self.leaking)
                others = torch.ones(self.batch.input_ids.shape[-1], dtype=torch.bool)
                others[own] = False
                kept, second = others.nonzero()[:, 0], self.changed(self.leaking)
                return first_leaking_module(
                    self.model, lambda: self.logits(self.batch), lambda: self.logits(second), kept, kept
                )
            own, second = _slots(self.batch, self.differing), self.alone(self.differing)
            length = self.batch.lengths[self.differing]
            return first_leaking_module(
                self.model,
                lambda: self.logits(self.batch),
                lambda: self.logits(second),
                torch.arange(own.start, own.stop),
                torch.arange(length),
                tolerance=report.tolerance,
            )


def _slots(batch: THDBatch, index: int) -> slice:
    start = sum(batch.lengths[:index])
    return slice(start, start + batch.lengths[index])


def _random_pack(model: nn.Module, vocab_size: int | None, lengths: Sequence[int], seed: int) -> THDBatch:
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(
            f"lengths={tuple(lengths)}: a leak needs at least two sequences of at least one token, for "
            f"example lengths={_LENGTHS}."
        )
    config = _text_config(getattr(model, "config", None))
    size = vocab_size or getattr(config, "vocab_size", None)
    if size is None or size < 8:
        raise ValueError(
            f"vocab_size={size} of {type(model).__name__}: pass the number of tokens, at least 8, as "
            "check_packing(model, vocab_size=...)."
        )
    ordinary = _ordinary_tokens(model, size)
    generator = torch.Generator().manual_seed(seed)
    picked = [ordinary[torch.randint(len(ordinary), (n,), generator=generator)] for n in lengths]
    return THDBatch.collate([{"input_ids": ids} for ids in picked]).to(_embedding(model).weight.device)


def _ordinary_tokens(model: nn.Module, vocab_size: int) -> Tensor:
    """Every token but those a config gives a meaning, such as the placeholder of an image."""
    config = getattr(model, "config", None)
    special: set[int] = set()
    for source in (config, _text_config(config)):
        for name, value in vars(source).items() if source is not None else ():
            if name.endswith(("token_id", "token_ids", "token_index")):
                special.update(value if isinstance(value, list | tuple) else [value])
    tokens = torch.arange(vocab_size)
    meant = torch.tensor([token for token in special if isinstance(token, int)], dtype=torch.int64)
    return tokens[~torch.isin(tokens, meant)]


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _default_forward(model: nn.Module) -> Forward:
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        return lambda model, batch: model(batch)

    def forward(model: nn.Module, batch: THDBatch) -> Any:
        with packed(batch):
            return model(**batch.hf_kwargs())

    return forward


def _embedding(model: nn.Module) -> nn.Embedding:
    get = getattr(model, "get_input_embeddings", None)
    found = get() if get is not None else None
    if found is None:
        found = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} has no nn.Embedding to find its inputs at. Give it a "
            "get_input_embeddings()."
        )
    embedding: nn.Embedding = found
    return embedding


@contextmanager
def _undisturbed(model: nn.Module) -> Generator[None]:
    """Put the model in eval mode and back, module by module, and leave the random state as it was.

    A compiled model runs as it is written: its graphs would pass by the hooks that look inside.
    """
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(0)
            yield
    finally:
        for module, flag in training.items():
            module.training = flag
