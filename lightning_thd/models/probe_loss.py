"""A loss and tokens to run it on -> how it counts its targets, or what is wrong with it.

The check changes the label of one token and measures by how much the loss moves. That is the *effect* of one
target. A right loss is a sum over targets times the batch's scale, so the effect stays the same if the
document runs in a pack of its own, if a pad is added, and if other targets are ignored. The effect depends on
the tokens up to the slot whose logits are scored, so noise on the embedding of one slot says which slot that
is. Parts of the loss that no label moves, such as the balance of experts, drop out of all of this.
Legend: T slots in a pack.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.models.probe_model import in_fp32, is_in_half, seed_generators
from lightning_thd.models.probe_training import as_in_training

LossFunction = Callable[[nn.Module, THDBatch], Any]

# The pack: the changed target is in the second document, far enough from both of its ends.
_LENGTHS = (3, 12, 8)
_SECOND = 1
_PLACE = 5  # the slot of the changed target in its document
_IGNORED = {2: (1, 2, 3)}  # by document, the tokens whose labels are ignored
_IGNORED_SLOT = sum(_LENGTHS[:2]) + 1  # the slot before one of them
_KEPT = (_PLACE + 1, _PLACE + 3)  # the tokens of the second document that keep labels if others lose them
_PAD = 29  # slots of the trailing pad

# Scales of no meaning: powers of two, so that they round nothing, and unlike one over any count of the pack.
_LOSS_SCALE = 1 / 8
_SEQUENCE_SCALE = 1 / 2
_TOKEN_SCALE = 1 / 32

_CANDIDATES = 4  # labels that are tried, of which the one with the largest effect is taken
# Two effects that should be equal may differ by this, relative to them. In fp32 this has room for TF32. They
# may differ by more if documents in another order show that rounding is larger, but not without a bound.
_SAME = 0.04
_SAME_IN_HALF = 0.2
_MOST_SAME = 0.25
_TIMES_SEEN = 5  # the tolerance over the rounding that one other order shows
_MOVED = 1e-5  # a larger relative change of an effect is caused by noise on an embedding, not by rounding
_MOVED_DIRECTLY = (
    1e-3  # noise on the slot that is scored changes an effect by more, kernels of experts by less
)
_NOISE = 10.0  # times the size of the embedding's output, so that it outweighs biases and other tokens
_ROUNDING = 2  # the most that rounding changes an effect, in units of the loss's resolution
_CLEAR = 80  # an effect is measured if it is this many times the rounding

_TARGETS = "Use batch.targets, which are shifted already, with the logits of all slots"
_SUM = "Return the sum of the losses of all targets (reduction='sum') times batch.loss_scale"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What the documents of the check are made of.

    Attributes:
        ids: int64 ``[n]``, token ids.
        labels: int64 ``[m]``, values that a target may have.
        are_next: whether targets are the next tokens; else they may be labels of the tokens themselves.
        weighted: whether the documents have weights, all 1.
        set_name: the ``set_name`` of the batches.
    """

    ids: Tensor
    labels: Tensor
    are_next: bool
    weighted: bool = False
    set_name: str = ""

    @classmethod
    def of(cls, batch: THDBatch) -> Tokens:
        """Take the ids and the labels that a batch holds; this reads the device."""
        ids = batch.input_ids.cpu()
        targets = batch.targets.cpu()
        has_target = targets != IGNORE_INDEX
        inside = has_target.clone()  # the target of a document's last slot, if it has one, is not in the pack
        inside[batch.cu_seqlens_padded.cpu().long()[1:] - 1] = False
        inside[-1] = False
        are_next = torch.equal(targets[inside], ids.roll(-1)[inside])
        labels = torch.unique(targets[has_target])
        return cls(
            ids=labels if are_next else torch.unique(ids),
            labels=labels,
            are_next=are_next,
            weighted=batch.weights is not None,
            set_name=batch.set_name,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossFinding:
    """What the check of a loss found.

    Attributes:
        kind: how the loss counts its targets; None if it was not measured.
        fault: what is wrong and what to do about it.
        advice: what is right only for some trainings, and what to do about it.
        skipped: what was not looked at, and why.
    """

    kind: str | None = None
    fault: str | None = None
    advice: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


class _NotMeasured(Exception):
    """Raised if a loss cannot be measured, with the reason."""


def look_at_loss(
    model: nn.Module,
    loss_fn: LossFunction,
    tokens: Tokens,
    *,
    forward: Callable[[THDBatch], Tensor],
    embedding: nn.Module,
    modes: Mapping[nn.Module, bool],
    most: int,
    several: bool | None = None,
) -> LossFinding:
    """Measure how a loss counts its targets, in training mode without dropout.

    Args:
        model: the module that ``loss_fn`` is called with, and whose state is restored.
        loss_fn: a function of model and batch that returns a loss, or a dict that holds one as ``"loss"``.
        tokens: the ids and labels of the packs.
        forward: a function of a batch that returns the model's logits.
        embedding: the token embedding that ``loss_fn`` runs.
        modes: the modes in which the modules were given, see ``as_in_training``.
        most: the most values of parameters that may be copied, to restore them or to run in fp32.
        several: whether a step may have several microbatches; None if that is unknown.
    """
    device = next(embedding.parameters()).device
    is_half = is_in_half(model, device.type)

    def measure(*, half: bool) -> LossFinding:
        embedded = _Embedded(embedding)
        probe = _LossProbe(model, loss_fn, tokens, forward, embedded, device, half=half)
        with probe.embedded.watched():
            return probe.finding(several=several)

    if len(tokens.labels) < 2:
        return LossFinding(skipped=("the loss: the batch has fewer than two different targets",))
    try:
        with warnings.catch_warnings(), as_in_training(model, modes, most=most), torch.no_grad():
            warnings.simplefilter("ignore")  # such as that self.log has no Trainer
            with in_fp32(model, most=most, rounded=True) as precise:  # the step may have an autocast inside
                if precise:
                    try:
                        return measure(half=False)
                    except Exception:  # a kernel may exist only in half precision
                        pass
            return measure(half=is_half)
    except _NotMeasured as error:
        return LossFinding(skipped=(f"the loss: {error}",))


class _Embedded:
    """The outputs of an embedding, which can be noisy at some slots, or those of an earlier run."""

    def __init__(self, embedding: nn.Module) -> None:
        self._embedding = embedding
        self._noisy: Sequence[int] = ()
        self._outputs: list[Tensor] = []
        self._replayed: list[Tensor] = []

    @contextmanager
    def watched(self) -> Generator[None]:
        """Watch the embedding inside this context."""
        with self._embedding.register_forward_hook(self._see):
            yield

    @contextmanager
    def noisy(self, slots: Sequence[int]) -> Generator[None]:
        """Add noise to the outputs of some slots inside this context."""
        self._noisy = slots
        try:
            yield
        finally:
            self._noisy = ()

    @contextmanager
    def held(self) -> Generator[None]:
        """Repeat the outputs of the run before this context, whatever the ids are."""
        self._replayed = list(self._outputs)
        if not self._replayed:
            raise _NotMeasured("it moves with no target, and does not call the model's embedding")
        try:
            yield
        finally:
            self._replayed = []

    def begin_run(self) -> None:
        """Forget the outputs of the run before, unless they are to be repeated."""
        self._outputs = []

    def _see(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Keep, change or replace an output of the embedding."""
        if self._replayed:
            return self._replayed.pop(0).clone()
        if not isinstance(output, Tensor):
            return output
        if self._noisy:
            output = output.clone()
            rows = output.view(-1, output.shape[-1])
            if len(rows) > max(self._noisy):
                generator = torch.Generator("cpu").manual_seed(0)
                noise = torch.randn(len(self._noisy), rows.shape[-1], generator=generator, device="cpu")
                size = _NOISE * rows.float().square().mean().sqrt()
                rows[list(self._noisy)] += (noise.to(rows.device) * size).to(rows.dtype)
        self._outputs.append(output.clone())
        return output


class _LossProbe:
    """The runs of one loss, and the packs they use."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        tokens: Tokens,
        forward: Callable[[THDBatch], Tensor],
        embedded: _Embedded,
        device: torch.device,
        *,
        half: bool,
    ) -> None:
        self.embedded = embedded
        self._model = model
        self._loss_fn = loss_fn
        self._tokens = tokens
        self._forward = forward
        self._device = device
        self._half = half
        self._same = _SAME_IN_HALF if half else _SAME
        self._from_ids = False  # whether labels are taken from input_ids, and not from targets
        self._other = 0  # the label in place of the changed one
        self._resolution = 0.0  # the eps of the loss's dtype
        self._rounding = 0.0  # the most that rounding changed the latest effect
        self._documents = self._draw()

    def finding(self, *, several: bool | None) -> LossFinding:
        """Return what the loss does."""
        pack = self._pack()
        slot = _LENGTHS[0] + _PLACE
        self._require_no_chance(pack)
        self._choose_label(pack, slot)
        skipped = list[str]()

        # A loss of few targets is small, and so is its rounding. But a mean of no targets would be NaN.
        small = pack if self._from_ids else self._pack(kept=(_PLACE + 1,), few=True)
        fault = self._fault_of_slots(small, slot, skipped)
        if fault is not None:
            return LossFinding(fault=fault, skipped=tuple(skipped))
        return self._of_weights(pack, slot, several=several, skipped=skipped)

    # ---- Packs

    def _draw(self) -> list[tuple[Tensor, Tensor]]:
        """Draw the ids and labels of every document; labels are next tokens if targets are."""
        generator = torch.Generator("cpu").manual_seed(0)

        def drawn(values: Tensor, length: int) -> Tensor:
            places = torch.randint(len(values), (length,), generator=generator, device="cpu")
            return values[places]

        documents: list[tuple[Tensor, Tensor]] = []
        for length in _LENGTHS:
            ids = drawn(self._tokens.ids, length)
            labels = ids if self._tokens.are_next else drawn(self._tokens.labels, length)
            documents.append((ids, labels))
        return documents

    def _pack(
        self,
        numbers: Sequence[int] = (0, _SECOND, 2),
        *,
        kept: Sequence[int] | None = None,
        few: bool = False,
        pad: int = 0,
    ) -> THDBatch:
        """Lay out some of the documents, by their numbers, and a pad.

        If ``kept`` is given, the second document keeps only these labels; with ``few``, others keep one.
        """
        samples: list[dict[str, Any]] = []
        values: list[Tensor] = []
        for number in numbers:
            ids, labels = self._documents[number]
            is_ignored = torch.zeros(len(ids), dtype=torch.bool, device="cpu")
            is_ignored[list(_IGNORED.get(number, ()))] = True
            if kept is not None and number == _SECOND:
                is_ignored[:] = True
                is_ignored[list(kept)] = False
            elif few:
                is_ignored[:-1] = True

            # Collation counts the targets; their values follow, because it refuses labels that look shifted.
            sample: dict[str, Any] = {"input_ids": ids, "labels": torch.where(is_ignored, IGNORE_INDEX, ids)}
            if self._tokens.weighted:
                sample["weights"] = 1.0
            samples.append(sample)
            values.append(labels.roll(-1))

        slots = sum(len(part) for part in values)
        batch = THDBatch.collate(
            samples,
            pad_to=slots + pad if pad else None,
            loss_scale=_LOSS_SCALE,
            sequence_scale=_SEQUENCE_SCALE,
            token_scale=_TOKEN_SCALE,
        )
        values.append(torch.zeros(pad, dtype=torch.int64, device="cpu"))
        targets = torch.where(batch.targets == IGNORE_INDEX, IGNORE_INDEX, torch.cat(values))
        batch = batch.replace(targets=targets, max_targets=batch.max_targets, set_name=self._tokens.set_name)
        return batch.to(self._device)

    # ---- Runs

    def _value(self, batch: THDBatch, *, seed: int = 0) -> float:
        """Return the loss of a pack."""
        seed_generators(self._model, seed)
        self.embedded.begin_run()
        loss = self._loss_fn(self._model, batch)
        if isinstance(loss, Mapping):
            loss = loss.get("loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise _NotMeasured("it returned no tensor of one number")
        if loss.dtype.itemsize < 4:
            raise _NotMeasured(f"it is computed in {loss.dtype}, and did not run in fp32")

        value = float(loss)
        if not math.isfinite(value):
            raise _NotMeasured(f"it was {value} on a small pack")
        self._resolution = torch.finfo(loss.dtype).eps
        return value

    def _effect(self, batch: THDBatch, slot: int, noisy: Sequence[int] = ()) -> float:
        """Return by how much the loss moves if the label of the token after a slot is changed."""
        with self.embedded.noisy(noisy):
            before = self._value(batch)
            if not self._from_ids:
                targets = batch.targets.clone()
                targets[slot] = self._other
                after = self._value(batch.replace(targets=targets, max_targets=batch.max_targets))

        if self._from_ids:  # the model computes what it did, so that only a loss that reads ids is moved
            with self.embedded.held():
                ids = batch.input_ids.clone()
                ids[slot + 1] = self._other
                after = self._value(batch.replace(input_ids=ids))

        self._rounding = _ROUNDING * self._resolution * max(abs(before), abs(after))
        return before - after

    def _require_no_chance(self, pack: THDBatch) -> None:
        """Stop if the loss depends on random numbers beside those of dropout."""
        values = [self._value(pack, seed=seed) for seed in (0, 1)]
        if values[0] != values[1]:
            raise _NotMeasured("it draws random numbers beside dropout")

    def _choose_label(self, pack: THDBatch, slot: int) -> None:
        """Find out whether the loss reads targets or ids, and choose the label that moves it most."""
        for self._from_ids in (False, True):
            self._other, is_clear = self._clearest_label(pack, slot)
            if is_clear and self._from_ids and self._ids_are_inputs(pack):
                raise _NotMeasured("no target moves it")
            if is_clear:
                return
        raise _NotMeasured("no label moves it")

    def _clearest_label(self, pack: THDBatch, slot: int) -> tuple[int, bool]:
        """Return the label of the token after a slot that moves the loss most, and whether it does."""
        values = self._tokens.ids if self._from_ids else self._tokens.labels
        now = pack.input_ids[slot + 1] if self._from_ids else pack.targets[slot]
        others = values[values != now.item()]
        effects: dict[int, float] = {}
        # The labels are spread over all that differ from the one that is there.
        for label in others[:: max(1, len(others) // _CANDIDATES)][:_CANDIDATES].tolist():
            self._other = label
            effects[label] = abs(self._effect(pack, slot))
        clearest = max(effects, key=lambda label: effects[label])
        return clearest, effects[clearest] > _CLEAR * self._rounding

    # ---- Which slot is scored

    def _fault_of_slots(self, pack: THDBatch, slot: int, skipped: list[str]) -> str | None:
        """Say what is wrong with the slots whose logits are scored."""
        end = _LENGTHS[0] + _LENGTHS[1]
        if self._moves_with(pack, slot, range(slot + 2, end)):
            skipped.append("which slot scores a target: the model looks at later tokens")
        elif self._moves_with(pack, slot, [slot + 1], directly=True):
            # In half precision a weak look at later tokens may be rounded away, such as that of an encoder.
            if self._half:
                skipped.append("whether tokens are scored on themselves: the loss did not run in fp32")
            elif self._from_ids or self._tokens.are_next:
                return (
                    "scores every token with its own logits, which have read it already, so the model learns "
                    f"to copy its input. The labels are not shifted. {_TARGETS}"
                )
        elif not self._moves_with(pack, slot, [slot], directly=True):
            if self._moves_with(pack, slot, [slot - 1], directly=True):
                return (
                    "is shifted twice: the logits of slot t are scored on token t + 2, not on the next one. "
                    f"{_TARGETS}. A model of transformers shifts labels itself: pass labels= and "
                    "shift_labels=batch.targets[None], or use causal_lm_loss(model, batch)"
                )
            skipped.append("which slot scores a target: noise on its embedding does not move the loss")

        if self._crosses_documents(pack):
            return (
                "scores the last token of a document on the first token of the next one. Use batch.targets, "
                "which are -100 there"
            )
        return None

    def _moves_with(self, pack: THDBatch, slot: int, noisy: Sequence[int], *, directly: bool = False) -> bool:
        """Return whether noise on the embeddings of some slots changes the effect of a label.

        ``directly`` asks for a change by the logits of these slots, and not through other slots.
        """
        noisy_effect = self._effect(pack, slot, noisy)
        effect = self._effect(pack, slot)
        least = _MOVED_DIRECTLY if directly else _MOVED
        return abs(noisy_effect - effect) > max(least * abs(effect), self._rounding)

    def _crosses_documents(self, pack: THDBatch) -> bool:
        """Return whether the last slot of a document is scored on the first token of the next."""
        return self._scores_id_after(pack, _LENGTHS[0] - 1)

    def _scores_id_after(self, pack: THDBatch, slot: int) -> bool:
        """Return whether the logits of a slot are scored on the id of the next slot."""
        if self._ids_are_inputs(pack):
            return False
        with self._reading_ids():
            try:
                self._other, is_clear = self._clearest_label(pack, slot)
                return is_clear and self._moves_with(pack, slot, [slot], directly=True)
            except _NotMeasured:  # the step does not call the embedding
                return False

    def _ids_are_inputs(self, pack: THDBatch) -> bool:
        """Return whether ids change the logits beside the embedding that is held, as a second table does."""
        self.embedded.begin_run()
        logits = self._forward(pack)
        try:
            with self.embedded.held():
                others = self._forward(pack.replace(input_ids=pack.input_ids.flip(0)))
        except _NotMeasured:  # the model does not call it
            return True
        return not torch.allclose(logits, others, rtol=1e-5, atol=float(1e-6 * logits.abs().max()))

    @contextmanager
    def _reading_ids(self) -> Generator[None]:
        """Change ids in place of targets inside this context, and keep the chosen label."""
        chosen = (self._from_ids, self._other)
        self._from_ids = True
        try:
            yield
        finally:
            self._from_ids, self._other = chosen

    # ---- What a target weighs

    def _of_weights(
        self, pack: THDBatch, slot: int, *, several: bool | None, skipped: list[str]
    ) -> LossFinding:
        """Say by what the loss of a target is multiplied and divided."""
        effect = self._effect(pack, slot)

        def times(batch: THDBatch, slot: int = slot) -> float:
            return self._effect(batch, slot) / effect

        other_order = times(self._pack((2, _SECOND, 0)), _LENGTHS[2] + _PLACE)
        same = max(self._same, _TIMES_SEEN * abs(other_order - 1))
        if same > _MOST_SAME:
            raise _NotMeasured(
                f"in another order of documents, a target weighs {other_order:.2f} times as much"
            )

        by_tokens = times(pack.replace(loss_scale=2 * _LOSS_SCALE)) - 1
        by_sequences = times(pack.replace(sequence_scale=2 * _SEQUENCE_SCALE)) - 1
        alone_pack = self._pack([_SECOND])
        kept_pack = self._pack(kept=_KEPT)
        padded: float | None = None
        try:
            padded = times(self._pack(pad=_PAD))
        except Exception as error:
            skipped.append(f"padding in the loss: {type(error).__name__} with a trailing pad")
        weights = _Weights(
            alone=times(alone_pack, _PLACE),
            padded=padded,
            kept=None if self._from_ids else times(kept_pack),
            same=same,
        )

        scaled = by_tokens + by_sequences
        fault: str | None = None
        advice = list[str]()
        if weights.agree(scaled, 1.0):
            is_by_sequences = not weights.agree(1 + by_sequences, 1.0)
            scale = "batch.sequence_scale" if is_by_sequences else "batch.loss_scale"
            kind = f"a sum times {scale}"
            fault = weights.fault_if_scaled(pack, alone_pack, scale, by_document=is_by_sequences)
        elif not weights.agree(1 + scaled, 1.0):
            skipped.append(f"what a target weighs: doubled scales multiply its loss by {1 + scaled:.2g}")
            kind = "scales that no rule of batches describes"
        else:
            kind, fault = weights.without_scale(pack, alone_pack, kept_pack)
            if fault is None and several:
                fault = _UNSCALED[kind]
            elif fault is None and (several is None or kind == _PLAIN_SUM):
                advice.append(_UNSCALED[kind])

        if self._from_ids and fault is None:
            learned: list[str] = []
            if self._scores_id_after(pack, _IGNORED_SLOT):
                learned.append("tokens whose label is -100 in the data")
            if weights.counts_pads:
                learned.append("padding, if packs have some")
            if learned:
                advice.append(f"takes input_ids as labels, and learns {' and '.join(learned)}. {_TARGETS}")
        return LossFinding(kind=kind, fault=fault, advice=tuple(advice), skipped=tuple(skipped))


_PLAIN_SUM = "a sum over its targets"
_PLAIN_MEAN = "a mean over its own targets"
_UNSCALED = {
    _PLAIN_SUM: f"is a sum that no scale of the batch multiplies, so it grows with what a pack holds. {_SUM}",
    _PLAIN_MEAN: "is a mean over its own targets and reads no scale of the batch, so microbatches of a step "
    f"weigh the same, whatever they hold. {_SUM}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weights:
    """What a target weighs in other packs, relative to its weight in the pack of all documents.

    Attributes:
        alone: its document has a pack of its own.
        padded: a trailing pad is added; None if that is not known.
        kept: most other targets of its document are ignored; None if the loss does not read targets.
        same: the largest relative difference of equal weights.
    """

    alone: float
    padded: float | None
    kept: float | None
    same: float

    def agree(self, weight: float, wanted: float) -> bool:
        """Return whether a measured weight is the wanted one."""
        return abs(weight - wanted) <= self.same * abs(wanted)

    @property
    def counts_pads(self) -> bool:
        """Return whether a pad changes what a target weighs."""
        return self.padded is not None and not self.agree(self.padded, 1.0)

    def fault_if_scaled(
        self, pack: THDBatch, alone: THDBatch, scale: str, *, by_document: bool
    ) -> str | None:
        """Say what is wrong with a loss that is multiplied by a scale of the batch."""
        if self.counts_pads:
            return self._of_pad()
        if not self.agree(self.alone, 1.0):
            divisor = "by what the pack holds"
            if self.agree(self.alone, pack.loss_tokens / alone.loss_tokens):
                divisor = "by the targets of the pack"
            elif self.agree(self.alone, len(pack.input_ids) / len(alone.input_ids)):
                divisor = "by the slots of the pack, ignored ones included,"
            return (
                f"divides {divisor} and is multiplied by {scale}, which divides once more: a target weighs "
                f"{self.alone:.2f} times as much if its document has a pack of its own. "
                f"{_how_to_sum(scale)}"
            )
        if not by_document and self.kept is not None and not self.agree(self.kept, 1.0):
            return (
                f"is no sum over targets: one weighs {self.kept:.2f} times as much if others of its document "
                f"are ignored. A mean of means over documents does this. {_SUM}. For a mean over sequences, "
                "multiply the sum of their means by batch.sequence_scale"
            )
        return None

    def without_scale(self, pack: THDBatch, alone: THDBatch, kept: THDBatch) -> tuple[str, str | None]:
        """Say what a loss is that no scale of the batch multiplies, and what is wrong with it."""
        others = (self.alone, *(() if self.kept is None else (self.kept,)))
        if self.counts_pads and self.kept is not None:
            return "a mean", self._of_pad()
        if all(self.agree(weight, 1.0) for weight in others):
            return _PLAIN_SUM, None

        counts = [pack.loss_tokens / alone.loss_tokens]
        if self.kept is None:  # it may not know which labels are ignored
            counts.append((len(pack.input_ids) - len(pack)) / (len(alone.input_ids) - len(alone)))
        is_mean = any(self.agree(self.alone, count) for count in counts)
        if self.kept is not None:
            is_mean = is_mean and self.agree(self.kept, pack.loss_tokens / kept.loss_tokens)
        if is_mean:
            return _PLAIN_MEAN, None

        if self.kept is not None and self.agree(self.kept, 1.0):
            return "a mean", (
                "counts ignored targets (-100) in its denominator: a target weighs the same if others are "
                f"ignored, and {self.alone:.2f} times as much if its document has a pack of its own. {_SUM}"
            )
        of_documents = self.agree(self.alone, len(pack))
        means = "is a mean of the means of documents" if of_documents else "is no mean over targets"
        return "a mean", (
            f"{means}: a target weighs {self.alone:.2f} times as much if its document has a pack of its own, "
            f"and would weigh {counts[0]:.2f} times as much in a mean over targets. {_SUM}. For a mean over "
            "sequences, multiply the sum of their means by batch.sequence_scale"
        )

    def _of_pad(self) -> str:
        return (
            "counts slots without a target, such as padding, in its denominator: one weighs "
            f"{self.padded:.2f} times as much if {_PAD} slots of padding follow. {_SUM}"
        )


def _how_to_sum(scale: str) -> str:
    """Say what to return in place of a mean that is scaled."""
    if scale == "batch.loss_scale":
        return _SUM
    return f"Multiply the sum of the means of sequences by {scale}"
