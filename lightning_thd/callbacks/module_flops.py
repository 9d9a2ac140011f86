"""A module and its first steps -> the FlopsModel of every stage, from configs or counted steps (own_model).

In the first step of a stage that runs a model, hooks count how often the step's tokens go through each model,
with and without gradients. Nothing is read from the device: shapes and the grad mode are enough.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_thd._find import is_compiled_in_place, is_compiled_wrapper, outermost_models
from lightning_thd._static import in_backward, only_looking
from lightning_thd.callbacks.own_model import OwnModel
from lightning_thd.callbacks.own_model import Policy as Policy
from lightning_thd.callbacks.seen import Seen
from lightning_thd.flops.backward import layers_of_module, share_of_experts, weights_by_layer
from lightning_thd.flops.listen import AttentionCall
from lightning_thd.flops.model import FlopsModel, Member, join
from lightning_thd.flops.pairs import AttentionPattern
from lightning_thd.flops.terms import Basis, Causal, Tokens, lone, matmul
from lightning_thd.parallel.pipeline.cut import stages_in
from lightning_thd.warnings import MeasureWarning, warn

_MAX_WATCHED = 3  # The steps of a stage are watched until one has calls, but at most so many.
_INPUTS = ("input_ids", "inputs_embeds", "hidden_states")
_HEADS = re.compile(r"(?:^|\.)(score|classifier|classification_head|v_head|value_head)\.")
_POOLED_HEADS = re.compile(_HEADS.pattern.replace("score|", "score|pooler|pre_classifier|head|"))
_TOWER = re.compile(r"(?:^|\.)(vision_tower|vision_model|visual|audio_tower|vision_backbone)\.")
_UNCOUNTED = 0.05  # We warn if a larger share of the weights is outside every known model.


@dataclass(frozen=True, slots=True)
class Passes:
    """How often each token goes through a model in one step, with gradients and under ``no_grad``."""

    training: float = 1.0
    forward: float = 0.0


class ModuleFlops:
    """Finds each stage's ``FlopsModel``: the user's, one built from configs, or a count of the first step."""

    def __init__(
        self, module: nn.Module, given: FlopsModel | None = None, *, sharded: bool, **conventions: Any
    ) -> None:
        self._module = module
        self._given = given
        self._sharded = sharded  # context parallelism: a call has a shard of the slots
        self._conventions = conventions
        self._models: dict[str, FlopsModel | None] = {}  # by stage; "" is the model before the first step
        self._tries: dict[str, int] = {}  # by stage, the number of watched steps
        self._stage = "train"  # the current one; validation may run between two microbatches of a step
        self._calls: dict[str, dict[str, _Calls]] = {}  # by stage
        self._weights = list(module.parameters())  # the weights when the FLOPs models were built
        self._trained = [weight.requires_grad for weight in self._weights]
        recompute: Policy = conventions.get("recompute", "auto")
        if given is not None and recompute != "auto":
            given = replace(given, recompute=recompute)
        self._models[""] = self._find({}) if given is None else given
        self._own = OwnModel(module, **conventions)

    def model(self, stage: str) -> FlopsModel | None:
        """Return the model that counts the FLOPs of a stage; None while it is unknown."""
        if stage in self._models:
            return self._models[stage]
        return self._own.model if self._models[""] is None else self._models[""]

    @property
    def pattern(self) -> AttentionPattern | None:
        """Return the FLOPs of our attention in a model without a known config; None for other models."""
        return self._own.pattern if self._models[""] is None else None

    @property
    def products(self) -> tuple[int, int, int] | None:
        """Return the counted FLOPs of the last ended step, of such a model; see ``OwnModel.products``."""
        return self._own.products if self._models[""] is None else None

    @property
    def hides_pairs(self) -> bool:
        """Return whether the counted FLOPs of such a model hold pairs of slots that no sequence has."""
        return self._own.hides_pairs and self._models[""] is None

    def calls(self) -> list[AttentionCall]:
        """Return attention calls since the last time that ``pattern`` does not count, of such a model."""
        return self._own.take() if self._models[""] is None else []

    def begin(self, stage: str, batch: Any = None, *, inside: bool = False) -> None:
        """Start to watch calls of known models or to count products, unless ``inside`` a running step."""
        self._stage = stage
        if self._given is not None:
            return
        if self._models[""] is None:
            self._own.begin(stage, batch, inside=inside)
            return

        decided = stage in self._models or self._tries.get(stage, 0) >= _MAX_WATCHED
        if not inside and stage not in self._calls and not decided:
            models = outermost_models(self._module)
            self._calls[stage] = {
                name: _Calls(self._module, model, lambda: self._stage == stage)
                for name, model in models.items()
            }

    def end(self, stage: str, step: Sequence[Seen], *, discard: bool = False) -> bool:
        """Update a stage's FLOPs model from its first step; return whether the counting slowed the step."""
        slow = False
        if self._given is None and self._models[""] is None:
            slow = self._own.end(stage, step)

        if stage in self._calls and not discard and step:
            passes = _passes(self._calls[stage], step, sharded=self._sharded)
            if stage == "train":
                # An interleaved pipeline schedule calls the model once for each stage of this rank.
                calls = max((stage_module.chunks for stage_module in stages_in(self._module)), default=1)
                passes = {name: Passes(x.training / calls, x.forward / calls) for name, x in passes.items()}
            else:
                # The meter of an evaluation counts forward work only, with or without gradients.
                passes = {name: Passes(x.training + x.forward) for name, x in passes.items()}
            if any(x.training or x.forward for x in passes.values()):
                reruns = {name: calls.reruns for name, calls in self._calls[stage].items()}
                self._models[stage] = self._find(passes, reruns)
            self._tries[stage] = self._tries.get(stage, 0) + 1
        self._stop_watch(stage)
        return slow

    @property
    def outdated(self) -> bool:
        """Return whether weights were frozen or unfrozen since the models were made; False in a pipeline."""
        if [weight.requires_grad for weight in self._weights] == self._trained:
            return False
        return not any(True for _ in stages_in(self._module))  # ranks of a pipeline would not agree

    def follow(self) -> None:
        """Rebuild the FLOPs models if weights were frozen or unfrozen since the last call."""
        self._weights = list(self._module.parameters())
        trained = [weight.requires_grad for weight in self._weights]
        if trained != self._trained and self._given is None:
            self._models = {"": None if self._models[""] is None else self._find({})}
            self._tries = {}
            self._own.forget()
        self._trained = trained

    def stop(self) -> None:
        """Remove all hooks and counters, after an error or in a step that is not counted completely."""
        for stage in tuple(self._calls):
            self._stop_watch(stage)
        self._own.stop()

    def _find(
        self, passes: dict[str, Passes], reruns: Mapping[str, Mapping[str, bool]] | None = None
    ) -> FlopsModel | None:
        return find_model(self._module, passes=passes, reruns=reruns, **self._conventions)

    def _stop_watch(self, stage: str) -> None:
        for calls in self._calls.pop(stage, {}).values():
            calls.stop()


@dataclass(slots=True)
class _Count:
    """The calls of one module by grad mode, and their slots, if the shapes of the inputs show them."""

    number: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    slots: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    unknown: bool = False
    recomputed: bool = False

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call, as a forward pre-hook."""
        if in_backward():  # checkpointing runs the layer again in backward
            self.recomputed = True
            return

        grad = torch.is_grad_enabled()
        slots = _slots(args, kwargs)
        self.number[grad] += 1
        if slots is None:
            self.unknown = True
        else:
            self.slots[grad] += slots


class _Calls:
    """Counts calls of a model and of its first layer by forward hooks, while ``runs()`` is true."""

    def __init__(self, around: nn.Module, model: nn.Module, runs: Callable[[], bool]) -> None:
        self.model = model
        self.visible = not is_compiled_in_place(model)  # whether hooks see every call of the model
        self.reruns: dict[str, bool] = {}  # modules that backward ran again, and whether to their end
        self._counts: list[_Count] = []
        self._handles: list[RemovableHandle] = []

        # The first layer shows what ran if the model's own calls are not seen.
        layers = [child[0] for child in model.modules() if isinstance(child, nn.ModuleList) and len(child)]
        for module in (model, *layers[:1]):
            count = _Count()
            self._counts.append(count)
            # A compiled module gets no hooks: torch would trace them, and trace again after they are removed.
            if not is_compiled_in_place(module):
                hook = only_looking(functools.partial(_note_if, runs, count))
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if not _is_traced(around, model):
            self._watch_reruns(runs)

    def _watch_reruns(self, runs: Callable[[], bool]) -> None:
        """Note which layers, parts of layers, and modules around them run again in backward."""
        for name, module in self.model.named_modules():
            if not _is_part(name) or all(weight.dim() < 2 for weight in module.parameters()):
                continue
            begin = only_looking(functools.partial(_note_rerun, runs, self.reruns, name, False))
            end = only_looking(functools.partial(_note_rerun, runs, self.reruns, name, True))
            self._handles.append(module.register_forward_pre_hook(begin))
            self._handles.append(module.register_forward_hook(end))

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def passes(self, microbatches: int, slots: int) -> Passes | None:
        """Return passes per token, or None if hooks cannot see the calls; ``slots`` is 0 if unknown."""
        called = [count for count in self._counts if any(count.number.values())]
        if not called:
            return Passes(0.0, 0.0) if self.visible else None

        count = called[0]  # the model's, or that of its first layer
        total = 0 if count.unknown else slots
        training = _share(count.number[True], count.slots[True], microbatches, total)
        forward = _share(count.number[False], count.slots[False], microbatches, total)
        if count.recomputed:  # reentrant checkpointing runs a layer first without gradients
            return Passes(training + forward, 0.0)
        return Passes(training, forward)


def _note_if(runs: Callable[[], bool], count: _Count, *call: Any) -> None:
    """Count a call, as a forward pre-hook, while ``runs()`` is true."""
    if runs():
        count.note(*call)


def _note_rerun(
    runs: Callable[[], bool], reruns: dict[str, bool], name: str, ended: bool, *call: Any
) -> None:
    """Note a call in backward, as a forward hook: activation checkpointing runs the module again."""
    if runs() and in_backward():
        reruns[name] = ended or reruns.get(name, False)


def _is_part(name: str) -> bool:
    """Return whether a name is that of a layer, of a direct part of one, or of a module around layers."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return len(parts) <= number + 2


def _is_traced(around: nn.Module, model: nn.Module) -> bool:
    """Return whether torch.compile traces a model inside the module ``around``, or a part of it."""
    if any(is_compiled_in_place(part) or is_compiled_wrapper(part) for part in model.modules()):
        return True
    # torch.compile(module) returns a wrapper around the module.
    wrappers = filter(is_compiled_wrapper, around.modules())
    return any(part is model for wrapper in wrappers for part in wrapper.modules())


def _passes(watched: dict[str, _Calls], step: Sequence[Seen], *, sharded: bool) -> dict[str, Passes]:
    """Return the passes per token of each model, from its calls or, if hooks see none, its gradients."""
    slots = 0 if sharded else sum(stats.slots for stats, _ in step)
    trained = {
        name: any(parameter.grad is not None for parameter in calls.model.parameters())
        for name, calls in watched.items()
    }

    passes_of: dict[str, Passes] = {}
    for name, calls in watched.items():
        passes = calls.passes(len(step), slots)
        if passes is None:
            # Without seen calls, a model ran only forward if it has no gradients and another model has some.
            only_forward = any(trained.values()) and not trained[name]
            passes = Passes(0.0, 1.0) if only_forward else Passes()
        passes_of[name] = passes
    return passes_of


def _slots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the slots of a call's input: a batch, token ids or hidden states; None if it is neither."""
    named = [kwargs[name] for name in _INPUTS if kwargs.get(name) is not None]
    inputs = [*named, *args]
    value = inputs[0] if inputs else None

    stats = getattr(value, "stats", None)
    if stats is not None:
        return int(stats.slots)
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    return value.shape[:-1].numel() if value.is_floating_point() else value.numel()


def _share(calls: int, slots: int, microbatches: int, total: int) -> float:
    """Return passes per token: calls per microbatch if every call had all slots, else slots / total."""
    if not calls:
        return 0.0
    if not microbatches or not total:  # the slots are unknown
        return float(max(1, round(calls / microbatches))) if microbatches else 1.0
    if calls % microbatches == 0 and slots >= 0.9 * total * calls / microbatches:
        return calls / microbatches  # padding to a graph's bucket adds slots but no passes
    return slots / total


def find_model(
    module: nn.Module,
    *,
    causal: Causal = "half",
    tokens: Tokens = "real",
    recompute: Policy = "auto",
    passes: Mapping[str, Passes] | None = None,
    reruns: Mapping[str, Mapping[str, bool]] | None = None,
) -> FlopsModel | None:
    """Join the FLOPs of a module's transformers models; None if it has none, or prints which is unknown.

    ``passes`` and ``reruns`` are what a watched step showed of each model.
    """
    models = outermost_models(module)
    members: list[Member] = []
    seeing: list[nn.Module] = []  # models whose FLOPs include those of their vision towers
    for path, child in models.items():
        name = path or type(module).__name__
        times = (passes or {}).get(path, Passes())
        if not times.training and not times.forward:
            continue
        try:
            model = FlopsModel.from_config(child.config, causal=causal, tokens=tokens)
        except ValueError as unknown:
            rank_zero_info(f"FLOPs of {name}: {unknown}")
            return None

        # In a pipeline, the FLOPs are those of the whole model, of which this rank runs stages.
        stage = next(stages_in(child), None)
        whole = child if stage is None or stage.whole is None else stage.whole
        layers, policy = layers_of_module(model.layers, whole, (reruns or {}).get(path))
        model = replace(model, layers=layers, recompute=policy)
        if recompute != "auto":
            model = replace(model, recompute=recompute)
        model = _with_own_head(model, child, module)

        members.append(Member(name=name, model=model, training=times.training, forward=times.forward))
        if model.sees_images:
            seeing.append(child)
    if not members:
        return None

    _warn_of_uncounted(module, models, seeing)
    return join(members)


def _with_own_head(model: FlopsModel, child: nn.Module, module: nn.Module) -> FlopsModel:
    """Count a reward, class or value head instead of logits, if a model has no language head."""
    output: Any = getattr(child, "get_output_embeddings", None)
    try:
        if output is None or output() is not None:
            return model
    except (AttributeError, NotImplementedError):
        return model

    groups = weights_by_layer(child, share_of_experts(child))
    pooled = type(child).__name__.endswith(("ForSequenceClassification", "ForMultipleChoice"))
    head_names = _POOLED_HEADS if pooled else _HEADS
    outside_layers = [*groups.get("transform", ()), *groups.get("", ())]
    heads = [weight for weight in outside_layers if weight.macs and head_names.search(weight.path)]

    vocabulary = getattr(child.config, "vocab_size", None)
    elsewhere = any(isinstance(x, nn.Linear) and x.out_features == vocabulary for x in module.modules())
    if not heads and elsewhere:  # the user's module has a language head of its own
        return model

    transforms = hasattr(child, "head") and not pooled  # ModernBERT transforms every token before the head
    left_out = ("lm_head",) if transforms else ("lm_head", "transform")
    layers = [layer for layer in model.layers if layer.path not in left_out]

    # A head gives a gradient to its input if anything before it is trained.
    trained_before = any(
        weight.trained for group in groups.values() for weight in group if not head_names.search(weight.path)
    )
    trained_before = trained_before or any(term.input_grad for term in layers[-1].terms)
    for head in heads:
        # A decoder's "score" runs on every token.
        basis: Basis = "sequence" if pooled and "score." not in head.path else "token"
        term = matmul("head", head.macs, kind="logits", basis=basis)
        term = replace(
            term,
            input_grad=term.forward * trained_before,
            weight_grad=term.forward * head.trained,
        )
        layers.append(lone("head", term))
        trained_before = trained_before or head.trained
    return replace(model, layers=tuple(layers))


def _warn_of_uncounted(
    module: nn.Module, models: Mapping[str, nn.Module], seeing: Sequence[nn.Module]
) -> None:
    """Warn if a tower, or more than ``_UNCOUNTED`` of the weights, is in no model whose FLOPs are known.

    Args:
        module: the user's module.
        models: the transformers models in it.
        seeing: those whose FLOPs include their vision towers.
    """
    counted = {
        id(parameter)
        for model in models.values()
        for name, parameter in model.named_parameters()
        if any(model is each for each in seeing) or not _TOWER.search(name)
    }
    rest = {
        name: parameter.numel()
        for name, parameter in module.named_parameters()
        if id(parameter) not in counted and parameter.dim() > 1
    }
    matches = [_TOWER.search(name) for name in rest]
    towers = {match[1] for match in matches if match is not None}
    total = sum(parameter.numel() for parameter in module.parameters())

    if total and (towers or sum(rest.values()) > _UNCOUNTED * total):
        others = {name.split(".")[0] for name in rest if not _TOWER.search(name)}
        names = sorted(towers | others)
        warn(
            f"FLOPs are counted for {', '.join(models) or type(module).__name__}, but "
            f"{sum(rest.values()) / total:.0%} of the weights are in {', '.join(names)}, whose cost is not "
            "known: MFU is too low by what they cost. Pass flops_model= to count everything.",
            MeasureWarning,
        )
