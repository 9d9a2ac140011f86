"""Costs of a model's layers -> the layers of each pipeline stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

from lightning_thd._checks import host_ints, real_number, whole_number
from lightning_thd.flops import FlopsModel
from lightning_thd.stats import SeqStats


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """The training FLOPs and parameters of a layer, the embedding or the head."""

    flops: float
    parameters: int = 0

    def __post_init__(self) -> None:
        real_number(self.flops, "flops")
        whole_number(self.parameters, "parameters")


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The layers of each pipeline stage, and its FLOPs and parameters with those of embedding and head."""

    bounds: tuple[int, ...]  # stage s holds the layers ``range(bounds[s], bounds[s + 1])``
    flops: tuple[float, ...]
    parameters: tuple[int, ...]
    ranks: int  # stage s runs on rank ``s % ranks``

    @property
    def stages(self) -> int:
        """Return the number of stages: ranks x stages per rank."""
        return len(self.bounds) - 1

    def layers(self, stage: int) -> range:
        """Return the indices of the layers that a stage holds."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def table(self) -> str:
        """Return the split as text, one line per stage: rank, layers, share of the FLOPs and parameters."""
        total = sum(self.flops) or 1.0
        return "\n".join(
            f"stage {stage} on rank {stage % self.ranks}: layers {held.start}-{held.stop - 1}, "
            f"{self.flops[stage] / total:.1%} of FLOPs, {self.parameters[stage]:,} parameters"
            for stage, held in enumerate(self.layers(stage) for stage in range(self.stages))
        )


def split_layers(
    layers: Sequence[LayerCost],
    *,
    ranks: int,
    stages_per_rank: int = 1,
    embedding: LayerCost | None = None,
    head: LayerCost | None = None,
    split: Literal["auto"] | Sequence[int] = "auto",
) -> Split:
    """Cut a stack of layers into stages: by ``split``, the number of layers of each, or into equal work."""
    ranks = whole_number(ranks, "ranks", least=1)
    stages = ranks * whole_number(stages_per_rank, "stages_per_rank", least=1)
    flops = [layer.flops for layer in layers]
    sizes = [layer.parameters for layer in layers]
    for end, extra in ((0, embedding), (-1, head)):  # they run on the stages of the first and the last layer
        if layers and extra is not None:
            flops[end] += extra.flops
            sizes[end] += extra.parameters

    if isinstance(split, str) and split == "auto":
        if stages > len(layers):
            raise ValueError(
                f"pipeline_parallel_size={ranks} x stages_per_rank={stages_per_rank} makes {stages} stages, "
                f"but the model has {len(layers)} layers. Every stage needs one: lower a size."
            )
        bounds = _even_bounds(flops, sizes, stages)
    else:
        numbers = host_ints(split, "split", advice="Pass the layers of each stage, or 'auto'.").tolist()
        if len(numbers) != stages or min(numbers) < 1 or sum(numbers) != len(layers):
            raise ValueError(
                f"pipeline_split={numbers} gives {len(numbers)} stages {sum(numbers)} layers; wanted "
                f"{stages} numbers of 1 or more that add up to the model's {len(layers)} layers, or 'auto'."
            )
        bounds = [0, *accumulate(numbers)]
    return Split(
        bounds=tuple(bounds),
        flops=tuple(sum(flops[start:stop]) for start, stop in pairwise(bounds)),
        parameters=tuple(sum(sizes[start:stop]) for start, stop in pairwise(bounds)),
        ranks=ranks,
    )


class _Cut(NamedTuple):
    """The first layers cut into some stages; of two cuts, the smaller is the better."""

    slowest_flops: float  # the FLOPs of the stage with the most
    largest_parameters: int  # the parameters of the stage with the most
    bounds: tuple[int, ...]


def _even_bounds(flops: Sequence[float], sizes: Sequence[int], stages: int) -> list[int]:
    """Cut layers into stages so that the slowest is as fast, then the largest as small, as can be.

    By dynamic programming over the stages: the best cut of the first b layers into s stages ends a best cut
    of the first a layers into s - 1 stages, for some a < b.
    """
    num_layers = len(flops)
    flops_before = [0.0, *accumulate(flops)]  # item i: all layers before layer i
    parameters_before = [0, *accumulate(sizes)]

    best = {0: _Cut(0.0, 0, (0,))}  # number of layers -> their best cut into the stages so far

    for stage in range(stages):
        longer: dict[int, _Cut] = {}
        stages_left = stages - stage - 1
        for start, cut in best.items():
            # Every stage that is left needs a layer; the last one takes all layers that are left.
            stops = range(start + 1, num_layers - stages_left + 1) if stages_left else (num_layers,)
            for stop in stops:
                longer_cut = _Cut(
                    max(cut.slowest_flops, flops_before[stop] - flops_before[start]),
                    max(cut.largest_parameters, parameters_before[stop] - parameters_before[start]),
                    (*cut.bounds, stop),
                )
                if stop > start and (stop not in longer or longer_cut[:2] < longer[stop][:2]):
                    longer[stop] = longer_cut

        best = longer

    return list(best[num_layers].bounds)


def layer_flops(
    config: Any, num_layers: int, lengths: Sequence[int]
) -> tuple[list[float], float, float] | None:
    """Count the FLOPs of each layer and of all modules before and after them; None for an unknown config."""
    try:
        model = FlopsModel.from_config(config)
    except ValueError:
        return None
    names = [f"layers.{i}" for i in range(num_layers)]
    paths = [layer.path for layer in model.layers]
    if not set(names) <= set(paths):
        return None

    def flops_of(parts: Collection[str]) -> float:
        some = replace(model, layers=tuple(layer for layer in model.layers if layer.path in parts))
        return float(some.training_flops(SeqStats.from_lengths(lengths, windows=some.windows)).model)

    before = [path for path in paths[: paths.index(names[0])] if path not in names]
    behind = set(paths) - set(names) - set(before)
    return [flops_of([name]) for name in names], flops_of(before), flops_of(behind)
