"""``context_parallel_size="dynamic"`` -> checked settings, process groups, and cut steps."""

from __future__ import annotations

from typing import Any, get_args

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

from lightning_thd._checks import choice, whole_number
from lightning_thd._find import model_config
from lightning_thd.alignment import Layout
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.flops import FlopsModel
from lightning_thd.packing.sharing import Sharing, check_tiling
from lightning_thd.parallel.context import traffic
from lightning_thd.parallel.context.costs import BYTES_PER_S, FLOPS_PER_S, LayerSizes
from lightning_thd.parallel.context.layout import Communication, know_whole_pack
from lightning_thd.parallel.context.shared_step import SharedStep
from lightning_thd.stats import SeqStats
from lightning_thd.strategies.axes import gathers_once

DYNAMIC = "dynamic"


def log_traffic(trainer: L.Trainer) -> None:
    """Log what attention exchanged since the last log, at steps at which the Trainer logs."""
    connector = trainer._logger_connector
    if not connector.should_update_logs:
        return
    found = traffic.take()
    if found.slots:
        metrics = {f"context_parallel/{way}": share for way, share in found.shares.items()}
        metrics["context_parallel/bytes_per_token"] = found.received_bytes / found.slots
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        connector.log_metrics(metrics)  # type: ignore[arg-type]  # floats are welcome


def check_degrees(size: Any, largest: int | None) -> None:
    """Refuse a context-parallel size and a largest size that contradict each other."""
    if size != DYNAMIC:
        advice = "Pass a number of ranks, or 'dynamic'."
        whole_number(size, "context_parallel_size", least=None, advice=advice)  # checked with the other axes
    if largest is not None:
        whole_number(largest, "max_context_parallel_size", least=None, advice="Pass a number of ranks.")
    if size == DYNAMIC and largest is None:
        raise ValueError(
            "context_parallel_size='dynamic' wants max_context_parallel_size=, the most ranks that may share "
            "a sequence: a power of two, such as 8."
        )
    if size != DYNAMIC and largest is not None:
        raise ValueError(
            f"max_context_parallel_size={largest} belongs to context_parallel_size='dynamic', but that is "
            f"{size}. Set one of the two."
        )


def check_ways(layout: Any, communication: Any) -> None:
    """Refuse unknown names of layouts and ways of communicating."""
    choice(layout, "context_parallel_layout", *get_args(Layout))
    choice(communication, "context_parallel_communication", *get_args(Communication))


def sharing_of(strategy: Any) -> Sharing:
    """Return how many ranks of a strategy may share a sequence, and at what cost."""
    stages = getattr(strategy, "pipeline_parallel_size", 1)
    if stages != 1:
        raise MisconfigurationException(
            f"context_parallel_size='dynamic' with pipeline_parallel_size={stages}: the stages of a pipeline "
            "pass on microbatches of one degree. Set pipeline_parallel_size=1, or a fixed "
            "context_parallel_size."
        )
    largest = strategy.max_context_parallel_size
    try:
        sharing = Sharing(
            max_degree=largest,
            layout=strategy.context_parallel_layout,
            tp=strategy.sizes.tensor,
            sequence_parallel=strategy.sequence_parallel,
            exchange=exchange_costs(strategy.lightning_module, largest),
            # DDP sums gradients once a step; sharded weights are gathered in every microbatch, or once.
            waits="step" if isinstance(strategy, DDPStrategy) or gathers_once(strategy) else "microbatch",
        )
        check_tiling(strategy.sizes.data, largest)
    except ValueError as err:
        raise MisconfigurationException(str(err)) from err
    return sharing


def check_batch(batch: Any, *, training: bool) -> None:
    """Refuse training batches that were not planned with dynamic degrees."""
    if training and isinstance(batch, THDBatch | THDStep) and not isinstance(batch, SharedStep):
        raise MisconfigurationException(
            f"context_parallel_size='dynamic' runs steps whose degrees were planned, but the dataloader gave "
            f"{type(batch).__name__}. Use THDDataModule, or a fixed context_parallel_size."
        )


def know_whole_packs(batch: Any) -> None:
    """Register a batch's packs as whole ones, while shards of a training step are alive."""
    apply_to_collection(batch, THDBatch, lambda pack: know_whole_pack(pack.cu_seqlens_padded))


def exchange_costs(module: nn.Module | None, largest: int) -> tuple[float, ...] | None:
    """Return the exchange's cost for each slot of a rank, in units of a token's linear work.

    There is one number for groups of 2, 4, ... ranks: bytes of all layers, forward and backward, by the
    cheaper of two ways. A model without a known config gives None.
    """
    config = model_config(module)
    if config is None:
        return None
    text = config.get_text_config()
    try:
        flops = float(FlopsModel.from_config(config).training_flops(SeqStats.from_lengths([1024])).hardware)
    except ValueError:
        return None
    heads = getattr(text, "num_attention_heads", 0) or 0
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    layer = LayerSizes(heads=heads, kv_heads=kv_heads, head_size=size, value_size=size, element_bytes=2)
    token_s = flops / 1024 / FLOPS_PER_S
    found = []
    for degree in (1 << i for i in range(1, largest.bit_length())):
        moved = layer.gather_bytes(1024, degree)
        if heads % degree == 0:
            moved = min(moved, layer.ulysses_bytes(1024, degree))
        slot_bytes = 2 * text.num_hidden_layers * moved / 1024
        found.append(slot_bytes / BYTES_PER_S / token_s)
    return tuple(found)
