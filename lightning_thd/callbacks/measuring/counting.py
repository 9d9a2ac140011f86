"""A LightningModule and its first steps -> the FlopsModel of every stage, from configs or torch's counter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_thd.callbacks.measuring.batches import Seen, microbatches
from lightning_thd.callbacks.measuring.calls import CallWatch, Passes
from lightning_thd.callbacks.measuring.models import Policy, find_model, models_in, training_signature
from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.terms import Causal, Tokens
from lightning_thd.flops.torch_counter import StepCounter, counted_layers
from lightning_thd.parallel.pipeline.cut import stages_in
from lightning_thd.stats import combine

_MAX_SHAPES = 4  # each costs a slow step
_MAX_WATCHED = 3  # steps that may pass before calls are taken as unknown


class Counting:
    """Finds the ``FlopsModel`` of each stage: the user's own, from configs, or by counting its first step."""

    def __init__(
        self, given: FlopsModel | None, *, causal: Causal, tokens: Tokens, recompute: Policy, sharded: bool
    ) -> None:
        self._given = given
        self._causal: Causal = causal
        self._tokens: Tokens = tokens
        self._recompute: Policy = recompute
        self._sharded = sharded
        self._models: dict[str, FlopsModel | None] = {}  # by stage; "" before anything was watched
        self._passes: dict[str, dict[str, Passes]] = {}
        self._watched: dict[str, int] = {}
        self._watch: CallWatch | None = None
        self._signature = 0
        self._counter: StepCounter | None = None
        self._shapes: set[int] = set()

    def find(self, module: nn.Module) -> None:
        """Build the FLOPs model from the configs of the models in ``module``."""
        self._signature = training_signature(module)
        self._models[""] = self._find(module, {}) if self._given is None else self._given

    def model(self, stage: str) -> FlopsModel | None:
        """Return the model that counts the FLOPs of a stage; None where none is known."""
        if stage in self._models:
            return self._models[stage]
        return self._models.get("train") if self._shapes else self._models[""]

    def begin(self, stage: str, module: nn.Module, batch: Any = None) -> None:
        """Watch what the step will run: calls of known models, or all operators where none is known."""
        if self._given is not None or self._watch is not None or self._counter is not None:
            return
        if self._models[""] is not None:
            tries = self._watched.get(stage, 0)
            if stage not in self._passes and tries < _MAX_WATCHED:
                self._watched[stage] = tries + 1
                self._watch = CallWatch(models_in(module))
        elif batch is not None:
            self._count(batch)

    def end(self, stage: str, module: nn.Module, step: Sequence[Seen], *, discard: bool = False) -> bool:
        """Update a stage's FLOPs model from its first step; return whether that slowed the step down."""
        if self._counter is not None and not step:  # of skipped batches alone
            self._stop_counter()
            self._shapes.clear()
            return True
        if self._counter is not None:
            self._take_counter(stage, module, step)
            return True
        if self._watch is not None and not discard and step:
            found = self._watch.passes(step, sharded=self._sharded)
            # Under the interleaved schedule a microbatch calls the model once for each stage of this rank.
            calls = max((held.chunks for held in stages_in(module)), default=1) if stage == "train" else 1
            found = {name: Passes(one.training / calls, one.forward / calls) for name, one in found.items()}
            if stage != "train":
                found = {name: Passes(one.training + one.forward) for name, one in found.items()}
            if any(one.training or one.forward for one in found.values()):
                self._passes[stage] = found
                self._models[stage] = self._find(module, found)
        self._stop_watch()
        return False

    def follow(self, module: nn.Module) -> None:
        """Rebuild the FLOPs models when weights were frozen or unfrozen since the last call."""
        signature = training_signature(module)
        if signature != self._signature and self._given is None and self._models[""] is not None:
            self.find(module)
            self._models = {"": self._models[""]}
            self._passes, self._watched = {}, {}
        self._signature = signature

    def stop(self) -> None:
        """Remove all hooks and counters, even after an error."""
        self._stop_watch()
        self._stop_counter()

    def _find(self, module: nn.Module, passes: dict[str, Passes]) -> FlopsModel | None:
        return find_model(
            module, causal=self._causal, tokens=self._tokens, recompute=self._recompute, passes=passes
        )

    def _count(self, batch: Any) -> None:
        slots = combine([stats for stats, _ in microbatches(batch)]).slots
        if slots and slots not in self._shapes and len(self._shapes) < _MAX_SHAPES:
            if not self._shapes:
                rank_zero_info(
                    "No transformers config was found to count FLOPs from: one step of every new shape is "
                    "counted with torch's FlopCounterMode. For exact counts pass flops_model=."
                )
            self._shapes.add(slots)
            self._counter = StepCounter()
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def _take_counter(self, stage: str, module: nn.Module, step: Sequence[Seen]) -> None:
        counter = self._stop_counter()
        assert counter is not None
        name = type(module).__name__
        stats = combine([stats for stats, _ in step])
        try:
            layers = counted_layers(counter, stats, name=name)
        except ValueError as nothing:
            rank_zero_info(f"FLOPs are not logged: {nothing}")
            return
        self._models[stage] = FlopsModel(name=name, layers=layers, tokens="slots")

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _stop_counter(self) -> StepCounter | None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return counter
