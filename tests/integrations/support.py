"""Loops of Accelerate and Fabric to be compared with a hand-written one, for several tests."""

from __future__ import annotations

from typing import Any

import accelerate
import lightning as L
import torch

from lightning_thd import Packs, Sequences, THDDataModule
from lightning_thd.integrations import PackedLoop, prepare_fabric, prepare_thd
from lightning_thd.packing import PackPlanner
from tests.tiny import TinyModule, largest_error, sequences, tiny_llama, train_by_hand

CAPACITY, STEPS = 48, 5


def make_data(step: Packs | Sequences) -> THDDataModule:
    return THDDataModule(sequences(60, labels=True), capacity=CAPACITY, global_batch=step)


def make_loop(
    engine: str, step: Any, accumulate: int = 1, *, data: Any = None, **kwargs: Any
) -> tuple[Any, PackedLoop]:
    model, data = tiny_llama(), data or make_data(step)
    optimizer = torch.optim.SGD(model.parameters(), lr=TinyModule().lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if engine == "accelerate":
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **kwargs)
        loop = prepare_thd(accelerator, model, data, optimizer, scheduler, peak=1e9)
        return accelerator, loop
    fabric = L.Fabric(accelerator="cpu", devices=_world(), strategy="ddp" if _world() > 1 else "auto")
    fabric.launch()
    loop = prepare_fabric(fabric, model, data, optimizer, accumulate=accumulate, peak=1e9)
    loop.scheduler = scheduler
    return fabric, loop


def _world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def run(
    loop: PackedLoop, steps: int, batches: Any = None
) -> tuple[dict[str, torch.Tensor], list[float], list[Any]]:
    losses, seen = [], []
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
    return {name.removeprefix("model."): p for name, p in params.items()}, losses


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return largest_error({n.removeprefix("model."): p for n, p in found.items()}, wanted) < 1e-12


class RecordsSteps:
    """A mixin that records the sequences of every microbatch."""

    seen: list[tuple[int, ...]]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(inputs["batch"].sequence_ids)
        loss: torch.Tensor = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        return loss
