"""Costs of a model's layers -> the layers of each pipeline stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

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
            for stage, held in enumerate(map(self.layers, range(self.stages)))
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
    flops, sizes = [x.flops for x in layers], [x.parameters for x in layers]
    for layer, extra in ((0, embedding), (-1, head)):
        if layers and extra is not None:
            flops[layer] += extra.flops
            sizes[layer] += extra.parameters
    if isinstance(split, str) and split == "auto":
        if stages > len(layers):
            raise ValueError(
                f"pipeline_parallel_size={ranks} x stages_per_rank={stages_per_rank} makes {stages} stages, "
                f"but the model has {len(layers)} layers. Every stage needs one: lower a size."
            )
        bounds = _even_bounds(flops, sizes, stages)
    else:
        given = host_ints(split, "split", advice="Pass the layers of each stage, or 'auto'.").tolist()
        if len(given) != stages or min(given) < 1 or sum(given) != len(layers):
            raise ValueError(
                f"pipeline_split={given} gives {len(given)} stages {sum(given)} layers; wanted {stages} "
                f"numbers of 1 or more that add up to the model's {len(layers)} layers, or 'auto'."
            )
        bounds = [0, *accumulate(given)]
    return Split(
        bounds=tuple(bounds),
        flops=tuple(sum(flops[a:b]) for a, b in pairwise(bounds)),
        parameters=tuple(sum(sizes[a:b]) for a, b in pairwise(bounds)),
        ranks=ranks,
    )


def _even_bounds(flops: Sequence[float], sizes: Sequence[int], stages: int) -> list[int]:
    n = len(flops)
    work, held = [0.0, *accumulate(flops)], [0, *accumulate(sizes)]
    # best[b]: (FLOPs of the slowest stage, parameters of the largest, bounds) if they hold the first b layers
    best: dict[int, tuple[float, int, list[int]]] = {0: (0.0, 0, [0])}
    for stage in range(stages):
        after: dict[int, tuple[float, int, list[int]]] = {}
        left = stages - stage - 1
        for a, (slow, large, bounds) in best.items():
            for b in range(a + 1, n - left + 1) if left else (n,):
                found = (max(slow, work[b] - work[a]), max(large, held[b] - held[a]), [*bounds, b])
                if b > a and (b not in after or found[:2] < after[b][:2]):
                    after[b] = found
        best = after
    return best[n][2]


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

    def flops(wanted: Collection[str]) -> float:
        part = replace(model, layers=tuple(layer for layer in model.layers if layer.path in wanted))
        return float(part.training_flops(SeqStats.from_lengths(lengths, windows=part.windows)).model)

    before = [path for path in paths[: paths.index(names[0])] if path not in names]
    behind = set(paths) - set(names) - set(before)
    return [flops([name]) for name in names], flops(before), flops(behind)
