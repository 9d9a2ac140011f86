"""Steps of a model without a known config -> its FLOPs: products of the first steps, all calls of attention.

The first step's products are counted, and those of one step with other lengths. Eight steps are counted if a
product has neither a row for each slot nor one for each sequence, as those of experts. If the products do not
grow with the slots, all steps are counted. In counted steps, compiled code runs uncompiled and graphs wait; a
model that would need that in every step is not counted. Our attention is counted by its windows from the
lengths of every batch. Calls with other offsets than the batch's, such as cross-attention, are kept in every
step. What activation checkpointing runs again is counted in the same steps, for HFU. If products
multiply all slots of a row by each other, as attention written by hand does, only HFU is logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_thd._find import holds_compiled_code
from lightning_thd._pages import see
from lightning_thd.batch.noted import unnoted
from lightning_thd.batch.thd_batch import THDBatch
from lightning_thd.boundaries import Boundaries
from lightning_thd.callbacks.seen import Dense, Rows, Seen, microbatches, resolve
from lightning_thd.flops.listen import AttentionCall
from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.pairs import AttentionPattern
from lightning_thd.flops.squares import hidden_pairs
from lightning_thd.flops.terms import Recompute
from lightning_thd.flops.torch_counter import (
    TRIALS,
    CallListener,
    Counted,
    StepCounter,
    counted,
    counted_layers,
)
from lightning_thd.stats import SeqStats, combine
from lightning_thd.warnings import MeasureWarning, warn

Policy: TypeAlias = Recompute | Literal["auto"]

# Policies under which checkpointing runs products or attention again, if no counted step shows it.
_REPEAT_PRODUCTS: tuple[Policy, ...] = ("full", "early_stop")
_REPEAT_ATTENTION: tuple[Policy, ...] = ("full", "early_stop", "selective")
_MOST_STEPS = 4  # a counted step is slow; if steps disagree, a mean of so many is used


class OwnModel:
    """Counts the FLOPs of a module in its first steps.

    Attributes:
        model: the FLOPs of everything but our attention; None before the first counted step.
        pattern: the FLOPs of our attention on the batches' own sequences.
        products: FLOPs of all products of the last ended step (forward, backward, run again by
            checkpointing), if ``model`` cannot tell them, else None.
        hides_pairs: whether products compute pairs of slots that no sequence has.
    """

    def __init__(self, module: nn.Module, *, recompute: Policy = "auto", **conventions: Any) -> None:
        self._module = module
        self._name = type(module).__name__
        self._conventions = conventions
        self._recompute: Policy = recompute
        self._repeats = False  # whether some counted call was run again by checkpointing
        self.model: FlopsModel | None = None
        self.pattern: AttentionPattern | None = None
        self._active: CallListener | None = None  # what listens to the running step
        self._taken = 0  # the calls of the running step that ``take`` has returned
        self._own_calls: list[AttentionCall] = []  # those of the running step on the batch's own sequences
        self._places: set[int] = set()  # addresses of the running step's own offsets
        self._has_others = False  # whether some attention has other offsets than the batch's
        self._steps: list[Counted] = []
        self._shards = 1  # ranks that share the slots of a pack in the counted steps
        # Whether steps of different lengths agreed, so that no more are counted. None if they cannot agree,
        # because products do not grow with the slots: then every step is counted.
        self._agree: bool | None = False
        self.products: tuple[int, int, int] | None = None
        self.hides_pairs = False
        self._warned_of_pairs = False
        self._warned_of_rows = False
        self._row_lengths: list[set[int]] = []  # different ones of counted steps

        self._gave_up = False  # whether the steps cannot be counted, after a warning
        self._is_whole = True  # whether a counter was on in the whole running step
        self._fewest_calls: float | None = None  # calls of attention in a microbatch of counted steps

        configs = (getattr(child, "config", None) for child in module.modules())
        self._decodes = any(getattr(config, "is_encoder_decoder", False) for config in configs)
        self._decoder_shares = set[float]()  # decoder slots per encoder slot, each ratio seen

    def begin(self, stage: str, batch: Any, *, inside: bool) -> None:
        """Begin to count or to listen; ``inside`` a running step, only remember its next batch."""
        places = set() if batch is None else set(_places(batch))
        if inside and self._active is not None:
            self._places |= places
            return
        self.stop()
        if batch is not None:
            self._places = places
        self._is_whole = not inside
        if self._gave_up:
            return
        # After an evaluation inside a step, the rest of the step says too little about its products.
        if stage == "train" and batch is not None and not inside and self._wants(batch):
            # Graphs wait for the steps from which the others are computed, but not for every step.
            self._active = StepCounter(self._module, needs_calls=self._agree is not None)
        elif self._has_others:
            self._active = CallListener()
        if self._active is not None:
            self._active.start()

    def take(self) -> list[AttentionCall]:
        """Return the calls since the last time whose offsets are not the batch's."""
        if self._active is None:
            return []

        self._repeats = self._repeats or self._active.repeats
        others: list[AttentionCall] = []
        for call in self._active.calls[self._taken :]:
            call = replace(call, again=self._again(call.forward, call.again, _REPEAT_ATTENTION))
            if self._is_own(call):
                self._own_calls.append(call)
            else:
                others.append(call)
        self._taken = len(self._active.calls)
        self._has_others = self._has_others or bool(others)
        return others

    def end(self, stage: str, step: Sequence[Seen]) -> bool:
        """End a step; return whether it was slow, because its products were counted for the first time."""
        active = self._active
        own_calls = self._own_calls
        self.products = None
        self.stop()
        if not isinstance(active, StepCounter):
            if active is not None and stage == "train" and step and self._misses_calls(active, len(step)):
                self._give_up(
                    f"attention of {self._name} on other lengths than the batch's, such as cross-attention, "
                    "runs compiled or from a CUDA graph, which hides its lengths. Pass flops_model=."
                )
            return False
        if not step:
            return True

        sequences = [_sequences(seen) for seen in step]
        stats = [stats for stats, _ in resolve(step)]
        counted_step = counted(active, stats, sequences)
        # Ranks that share a pack run a shard each, and the FLOPs are those of the pack.
        shards = max((call.shards for call in own_calls), default=1)
        every_step_is_counted = self._agree is None
        if not every_step_is_counted or active.missed_calls:
            self._learn(counted_step, own_calls, len(step), shards)
        if self._gave_up:
            return True
        self._note_calls(active, len(step))
        if shards == 1:
            shapes = [_shape(seen) for seen in step]
            self._look_for_pairs(counted_step, list(zip(stats, shapes, strict=True)))
            self._look_for_leaks(active.unmasked_rows, step)

        forward, backward, again = counted_step.flops
        again = self._again(forward, again, _REPEAT_PRODUCTS)
        self.products = (shards * forward, shards * backward, shards * again)
        return not every_step_is_counted  # else all steps are equally slow, and have to be rated

    def stop(self) -> None:
        """Stop to listen, after a step or an error."""
        if self._active is not None:
            self._active.stop()
        self._active = None
        self._taken = 0
        self._own_calls = []
        self._places = set()

    def forget(self) -> None:
        """Count again, because weights were frozen or unfrozen; the old counts hold until then."""
        self.stop()
        self._steps = []
        self._agree = False
        self._gave_up = False
        self._repeats = False
        self.hides_pairs = False
        self._row_lengths = []

    def _again(self, forward: int, counted: int, policies: tuple[Policy, ...]) -> int:
        """Return the FLOPs that checkpointing runs again: the counted ones, or those of the user's policy."""
        if self._repeats:
            return 0 if self._recompute == "none" else counted
        return forward if self._recompute in policies else 0

    def _look_for_pairs(self, step: Counted, microbatches: list[tuple[SeqStats, tuple[int, int]]]) -> None:
        """Find products that multiply slots which no sequence has in common; warn once of them."""
        lengths = {length for _, (_, length) in microbatches}
        if lengths not in self._row_lengths and self._agree is not None:
            self._row_lengths.append(lengths)
        if self._agree and len(self._row_lengths) > 1:
            # Pairs grow with the square of a row. These products do not, so their sizes are alike by chance.
            self.hides_pairs = False
            return

        hidden = hidden_pairs(
            step.squares,
            microbatches,
            sum(step.flops[:2]),
            causal=self._conventions.get("causal", "half"),
            tokens=self._conventions.get("tokens", "real"),
        )
        if hidden is None:
            return
        self.hides_pairs = True
        if not self._warned_of_pairs:
            self._warned_of_pairs = True
            warn(
                f"device/mfu, TFLOP/s and total_flops of {self._name} are not logged, because the model "
                f"FLOPs of this step would be {hidden.times:.2f} times too high: {hidden.reason} device/hfu "
                f"is logged, because the device computes these pairs. {see('pairs')}",
                MeasureWarning,
            )

    def _look_for_leaks(self, unmasked: set[int], step: Sequence[Seen]) -> None:
        """Warn once if torch's attention ran over a pack of several sequences as one row without a mask."""
        for stats, lengths in step:
            if not isinstance(lengths, tuple) or isinstance(lengths, Dense) or self._warned_of_rows:
                continue
            if len(lengths) < 2 or stats.slots not in unmasked:
                continue
            self._warned_of_rows = True
            warn(
                f"scaled_dot_product_attention of {self._name} ran over all {stats.slots:,} slots of a "
                f"pack of {len(lengths)} sequences without a mask, so their tokens see each other, "
                "while FLOPs and MFU count each sequence by itself. Call varlen_attention(q, k, v, "
                f"batch.boundaries). {see('pairs')}",
                MeasureWarning,
            )

    def _give_up(self, reason: str) -> None:
        """Log no FLOPs from now on, and warn why."""
        self._gave_up = True
        self.model = None
        self.pattern = None
        self.products = None
        warn(f"FLOPs and MFU are not logged: {reason}", MeasureWarning)

    def _note_calls(self, counter: CallListener, microbatches: int) -> None:
        """Note how many calls of our attention a microbatch makes."""
        calls = len(counter.calls) / microbatches
        fewest = self._fewest_calls
        self._fewest_calls = calls if fewest is None else min(fewest, calls)

    def _misses_calls(self, listener: CallListener, microbatches: int) -> bool:
        """Return whether attention ran in a step where the listener did not see all of its calls."""
        if listener.missed_calls:
            return True
        calls = len(listener.calls) / microbatches
        if not self._is_whole or self._fewest_calls is None or calls >= self._fewest_calls:
            return False
        # A model may call its attention less often. Compiled code reports no call.
        return not calls or holds_compiled_code(self._module)

    def _is_own(self, call: AttentionCall) -> bool:
        """Return whether a call's queries and keys are the sequences of the running batches."""
        if call.whole is not None:
            return True
        same = call.cu_seqlens_q.data_ptr() == call.cu_seqlens_kv.data_ptr()
        return same and call.cu_seqlens_q.data_ptr() in self._places

    def _wants(self, batch: Any) -> bool:
        """Return whether to count a step: the first, and others until two of different lengths agree."""
        seen = microbatches(batch)
        slots = combine([stats for stats, _ in seen]).slots
        if not slots or self._varies(batch, slots):
            return False

        if not self._steps:
            rank_zero_info(
                "No transformers config gives the FLOPs: the products of the first step are counted, and "
                "those of one step of other lengths. What torch.compile compiled runs uncompiled in counted "
                "steps. To give the FLOPs yourself, pass flops_model=."
            )
            return True
        if self._agree is None:  # all steps are counted
            return True
        if self._agree:
            # Pairs of slots grow with the square of a row, which rows of one length do not show.
            lengths = {_shape(each)[1] for each in seen}
            return self.hides_pairs and lengths not in self._row_lengths
        if any(step.other_rows(self._shards) for step in self._steps):
            return len(self._steps) < TRIALS
        if len(self._steps) >= _MOST_STEPS:
            return False

        sequences = sum(_sequences(each) for each in seen)
        counted_shapes = {(step.stats.slots, sum(step.sequences)) for step in self._steps}
        return (slots, sequences) not in counted_shapes

    def _varies(self, batch: Any, slots: int) -> bool:
        """Return whether a decoder's share of the tokens has changed; then say that nothing is counted."""
        if not self._decodes or not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), Tensor):
            return False
        self._decoder_shares.add(batch["labels"].numel() / slots)
        if len(self._decoder_shares) == 2:  # say it once
            self.model = self.pattern = None
            warn(
                "FLOPs are no longer logged: the decoder's share of the tokens varies, so a counted step "
                "says nothing about others. Pass flops_model=, or pad to fixed lengths.",
                MeasureWarning,
            )
        return len(self._decoder_shares) > 1

    def _learn(self, step: Counted, own_calls: list[AttentionCall], microbatches: int, shards: int) -> None:
        """Make the FLOPs model and the pattern from the counted steps, of which this is the last."""
        self._steps.append(step)
        self._shards = shards
        try:
            is_compiled = holds_compiled_code(self._module)
            layers, self._agree = counted_layers(
                self._steps, name=self._name, shards=shards, is_compiled=is_compiled
            )
        except ValueError as err:
            self._give_up(str(err))
            return
        model = FlopsModel(name=self._name, layers=layers, **self._conventions)
        if not self._repeats and self._recompute != "auto":
            model = model.with_recompute(self._recompute)
        elif self._repeats and self._recompute != "none":
            model = replace(model, recompute="full")
        self.model = model
        convention = self._conventions.get("causal", "half")
        self.pattern = AttentionPattern.of(own_calls, microbatches, convention)


def _sequences(seen: Seen) -> int:
    """Return the number of a microbatch's sequences, without a read of the device."""
    stats, lengths = seen
    return len(lengths) if isinstance(lengths, tuple) else stats.sequences


def _shape(seen: Seen) -> tuple[int, int]:
    """Return a microbatch's number of rows, and the slots of each; a pack is one row."""
    stats, lengths = seen
    if isinstance(lengths, Rows):
        return lengths.shape
    if isinstance(lengths, Dense) and lengths:
        return len(lengths), lengths[0]
    return 1, stats.slots


def _places(batch: Any) -> Iterable[int]:
    """Yield the addresses of the offsets of a batch's own sequences, without a read of the device."""
    if isinstance(batch, THDBatch):
        for offsets in unnoted(batch).boundaries.tensors().values():
            yield offsets.data_ptr()
        return

    several = getattr(batch, "microbatches", None)
    if isinstance(several, Sequence):
        for microbatch in several:
            yield from _places(microbatch)
        return

    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for member in batch:
            if not isinstance(member, Tensor):
                yield from _places(member)
        return

    boundaries = getattr(batch, "boundaries", None)
    if isinstance(boundaries, Boundaries):
        for offsets in boundaries.tensors().values():
            yield offsets.data_ptr()
