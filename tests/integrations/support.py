"""Loops of Accelerate and Fabric to be compared with a hand-written one, for several tests."""

from __future__ import annotations

from typing import Any

import accelerate
import lightning as L
import pytest
import torch

from lightning_thd import Packs, Sequences, THDDataModule
from lightning_thd.integrations import PackedLoop, prepare_fabric, prepare_thd
from lightning_thd.packing import PackPlanner
from tests.tiny import TinyModule, largest_error, nll, sequences, tiny_llama, train_by_hand

CAPACITY = 48
STEPS = 5


def make_data(step: Packs | Sequences | None) -> THDDataModule:
    return THDDataModule(sequences(60, labels=True), capacity=CAPACITY, global_batch=step)


def make_loop(
    engine: str, step: Any, accumulate: int = 1, *, data: Any = None, model: Any = None, **options: Any
) -> tuple[Any, PackedLoop]:
    """Return Accelerator or Fabric and its loop; ``host`` may be given, others go to ``prepare_*``."""
    model = model or tiny_llama()
    data = data or make_data(step)
    optimizer = torch.optim.SGD(model.parameters(), lr=TinyModule().lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    host = options.pop("host", None)
    options = {"peak": 1e9, **options}

    if engine == "accelerate":
        host = host or accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        return host, prepare_thd(host, model, data, optimizer, scheduler, **options)

    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    fabric = L.Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")
    fabric.launch()
    loop = prepare_fabric(fabric, model, data, optimizer, accumulate=accumulate, **options)
    loop.scheduler = scheduler
    return fabric, loop


def run(
    loop: PackedLoop, steps: int, batches: Any = None
) -> tuple[dict[str, torch.Tensor], list[float], list[Any]]:
    losses = []
    seen = []
    for _, batch in zip(range(steps), batches or epochs(loop), strict=False):
        losses.append(float(loop.backward(batch)))
        seen.append([b.sequence_ids for b in batch.microbatches])
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.scheduler.step()
    model = getattr(loop.model, "module", loop.model)
    model = getattr(model, "module", model)
    return {n: p.detach().clone() for n, p in model.named_parameters()}, losses, seen


def epochs(loop: PackedLoop) -> Any:
    while True:
        yield from loop.loader


def by_hand(
    step: Packs | Sequences, dp: int, steps: int = STEPS
) -> tuple[dict[str, torch.Tensor], list[float]]:
    samples = sequences(60, labels=True)
    planner = PackPlanner([len(s["input_ids"]) for s in samples], CAPACITY, global_batch=step)
    params, losses = train_by_hand(samples, planner, steps, dp=dp)
    return strip(params), losses


def strip(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): value for name, value in params.items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], within: float = 1e-12) -> bool:
    return largest_error(strip(found), wanted) < within


def check_ranks(ranks: Any, wanted: dict[str, torch.Tensor], losses: list[float], within: float) -> None:
    """Compare every rank's parameters, and the mean of the ranks' losses, with a loop by hand."""
    for params, *_ in ranks:
        assert same(params, wanted, within)
    means = [sum(shares) / len(ranks) for shares in zip(*(rank[1] for rank in ranks), strict=True)]
    assert means == pytest.approx(losses, rel=within)


def mean_nll(samples: Any, model: Any = None, params: Any = None) -> tuple[float, int]:
    """Return the mean loss over the loss tokens of sequences that are never packed, and their number."""
    model = model or tiny_llama()
    model.load_state_dict(params or {}, strict=False)
    with torch.no_grad():
        results = [nll(model, sample) for sample in samples]
    tokens = int(sum(count for _, count in results))
    return float(sum(total for total, _ in results)) / tokens, tokens


class RecordsSteps:
    seen: list[tuple[int, ...]]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen += [inputs["batch"].sequence_ids] if model.training else []
        loss: torch.Tensor = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        return loss
