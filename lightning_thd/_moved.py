"""Old module paths -> the modules that stand there now, for one minor release, with a warning."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

# Below ``lightning_thd.``, from 0.1 to 0.2. Goes with 0.3.
MOVED = {
    "parallel.partition": "parallel.context.partition",
    "parallel.layout": "parallel.context.layout",
    "models.positions": "models.inputs.positions",
    "models.masks": "models.inputs.masks",
    "attention.cpu": "attention.kernels.cpu",
    "attention.cpu_op": "attention.kernels.cpu_op",
    "attention.flash": "attention.kernels.flash",
    "attention.flash_cpu": "attention.kernels.flash_cpu",
    "attention.kernel": "attention.kernels.kernel",
    "attention.masks": "attention.kernels.masks",
    "attention.plan": "attention.kernels.plan",
    "attention.rows": "attention.kernels.rows",
    "attention.sinks": "attention.kernels.sinks",
    "attention.te": "attention.kernels.te",
    "attention.tiled": "attention.kernels.tiled",
    "attention.torch_varlen": "attention.kernels.torch_varlen",
    "callbacks.cuda_graph.agree": "parallel.agreement",
    "callbacks.cuda_graph.attribute_reads": "cuda_graph.limits.attribute_reads",
    "callbacks.cuda_graph.autocast": "cuda_graph.limits.autocast",
    "callbacks.cuda_graph.backend": "cuda_graph.capture.backend",
    "callbacks.cuda_graph.buckets": "cuda_graph.shapes.buckets",
    "callbacks.cuda_graph.callback": "callbacks.cuda_graph",
    "callbacks.cuda_graph.capture": "cuda_graph.capture.capture",
    "callbacks.cuda_graph.captured": "cuda_graph.capture.captured",
    "callbacks.cuda_graph.checkpoint_rng": "cuda_graph.limits.checkpoint_rng",
    "callbacks.cuda_graph.cli": "cli.graph_plan",
    "callbacks.cuda_graph.costs": "cuda_graph.choice.costs",
    "callbacks.cuda_graph.errors": "cuda_graph.errors",
    "callbacks.cuda_graph.graphed_step": "cuda_graph.graphed_step",
    "callbacks.cuda_graph.guards": "cuda_graph.limits.guards",
    "callbacks.cuda_graph.host_reads": "cuda_graph.limits.host_reads",
    "callbacks.cuda_graph.layer_call": "cuda_graph.capture.layer_call",
    "callbacks.cuda_graph.layers": "cuda_graph.capture.layers",
    "callbacks.cuda_graph.lint": "cuda_graph.lint",
    "callbacks.cuda_graph.measuring": "cuda_graph.choice.measuring",
    "callbacks.cuda_graph.module_state": "cuda_graph.limits.module_state",
    "callbacks.cuda_graph.padding": "cuda_graph.shapes.padding",
    "callbacks.cuda_graph.pair": "cuda_graph.capture.pair",
    "callbacks.cuda_graph.plan": "cuda_graph.choice.plan",
    "callbacks.cuda_graph.recording": "cuda_graph.capture.recording",
    "callbacks.cuda_graph.sampling": "cuda_graph.choice.sampling",
    "callbacks.cuda_graph.stand_ins": "cuda_graph.capture.stand_ins",
    "callbacks.cuda_graph.static_batch": "cuda_graph.shapes.static_batch",
    "callbacks.cuda_graph.static_shard": "cuda_graph.shapes.static_shard",
    "callbacks.cuda_graph.stats": "cuda_graph.stats",
    "callbacks.cuda_graph.subclasses": "cuda_graph.limits.subclasses",
    "callbacks.cuda_graph.support": "cuda_graph.limits.support",
    "callbacks.cuda_graph.timing": "cuda_graph.choice.timing",
    "callbacks.cuda_graph.trainer_side": "callbacks._graph_host",
    "data.arrays": "data.store.arrays",
    "data.chat": "data.read.chat",
    "data.columns": "data.store.columns",
    "data.encode": "data.read.encode",
    "data.index": "data.store.index",
    "data.prepacked": "data.read.prepacked",
    "data.records": "data.read.records",
    "data.sources": "data.read.sources",
    "data.text": "data.read.text",
    "data.tokenize": "data.read.tokenize",
    "flops.cli": "cli.flops",
    "flops.counted": "flops.torch_counter",
    "flops.experts": "flops.families.experts",
    "flops.hf": "flops.families.registry",
    "flops.ints": "flops.vector",
    "flops.mixers": "flops.families.mixers",
    "flops.parts": "flops.families.parts",
    "flops.sizes": "flops.families.sizes",
    "flops.trainable": "flops.backward.passes",
    "flops.vision": "flops.families.vision",
    "flops.weights": "flops.backward.weights",
    "loss.reduce": "loss.rollouts.reduce",
    "loss.rollout_plan": "loss.rollouts.plan",
    "loss.budget": "loss.tiles.budget",
    "loss.gradient_sums": "loss.tiles.gradient_sums",
    "loss.head": "loss.tiles.logits",
    "loss.head_call": "loss.model_head.head_call",
    "loss.lazy_logits": "loss.model_head.lazy_logits",
    "loss.logit_map": "loss.tiles.logit_map",
    "loss.nll_tiles": "loss.tiles.nll",
    "loss.products": "loss.tiles.products",
    "loss.rows": "loss.tiles.rows",
    "loss.vocab_parallel": "loss.tiles.vocab_parallel",
    "loss.wrapped": "loss.model_head.wrapped",
    "models.gathered": "models.whole_pack",
    "models.groups": "models.padded_groups",
    "models.packing_report": "models.probe.report",
    "models.survey": "models.unknown_layers",
    "models.trace": "models.probe.trace",
    "packing.global_batch": "packing.plan",
    "packing.slots": "packing.lengths",
}


class _Finder(importlib.abc.MetaPathFinder):
    """Import finder for the modules that stood at an old path."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        new = MOVED.get(name.removeprefix("lightning_thd."))
        return None if new is None else importlib.machinery.ModuleSpec(name, _Loader(f"lightning_thd.{new}"))


class _Loader(importlib.abc.Loader):
    """Import loader that gives the module at the new path under its old name too."""

    def __init__(self, new: str) -> None:
        self.new = new

    def exec_module(self, module: ModuleType) -> None:
        warnings.warn(
            f"{module.__name__} is now {self.new}. Import it from there: the old path goes with release 0.3.",
            DeprecationWarning,
            stacklevel=2,
        )
        sys.modules[module.__name__] = importlib.import_module(self.new)


def install() -> None:
    """Register the finder of old module paths; calling it again changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
