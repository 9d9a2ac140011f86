"""Modules that can be captured, batches of random shape, and what they are compared by."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd._static import static_shapes
from lightning_thd.batch import IGNORE_INDEX
from lightning_thd.batch.collate import cumulative
from lightning_thd.boundaries import Boundaries
from lightning_thd.callbacks.cuda_graph import Bucket, GraphedStep, make_buckets
from lightning_thd.cuda_graph.buckets import BatchShape, choose
from lightning_thd.cuda_graph.recording import RecordingBackend
from lightning_thd.seqlens import pad_cu_seqlens, position_ids_from_cu_seqlens
from tests.tiny import VOCAB, tiny_llama

LONGEST = 24
BUCKETS = make_buckets((8, 14), slots=128, max_seqlen=LONGEST)


def random_batch(seed: int, *, count: int | None = None, longest: int = LONGEST, low: int = 3) -> THDBatch:
    """Sequences of random lengths and ids: ``count`` of them, or 1 to 12."""
    rng = np.random.default_rng(seed)
    if count is None:
        count = int(rng.integers(1, 13))
    lengths = rng.integers(1, longest + 1, count)
    samples = [{"input_ids": rng.integers(low, 60, int(n))} for n in lengths]
    return THDBatch.collate(samples)


def slow_offsets(batch: THDBatch, bucket: Bucket) -> tuple[Tensor, Tensor]:
    """Return a batch's offsets in a bucket by pad_cu_seqlens, and those without padding inside sequences."""
    num_sequences = BatchShape.of_batch(batch).sequences
    offsets = cumulative(list(batch.padded_lengths[:num_sequences]))
    padded = pad_cu_seqlens(offsets, bucket.sequences, bucket.slots, max_seqlen=bucket.max_seqlen)
    dummy_lengths = padded.diff().tolist()[num_sequences:]
    return padded, cumulative([*batch.lengths[:num_sequences], *dummy_lengths])


def pad_batch(batch: THDBatch, bucket: Bucket) -> THDBatch:
    """Pad a batch eagerly to a bucket's T slots and S + 1 offsets, on its device; the tail has no targets."""
    device = batch.input_ids.device
    used = BatchShape.of_batch(batch).slots
    tail = bucket.slots - used

    padded, real = slow_offsets(batch, bucket)
    positions = position_ids_from_cu_seqlens(padded, bucket.slots)[used:].to(device)
    positions = positions.expand(*batch.position_ids.shape[:-1], tail)

    return batch.replace(
        input_ids=torch.nn.functional.pad(batch.input_ids[:used], (0, tail)),
        targets=torch.nn.functional.pad(batch.targets[:used], (0, tail), value=IGNORE_INDEX),
        position_ids=torch.cat([batch.position_ids[..., :used], positions], dim=-1),
        boundaries=Boundaries(
            offsets=padded.to(device),
            real_offsets=None if torch.equal(padded, real) else real.to(device),
            slots=bucket.slots,
            max_seqlen=bucket.max_seqlen,
            lengths=padded.diff().tolist(),
            sequence_lengths=batch.lengths,
        ),
        max_targets=batch.max_targets,
    )


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor]:
    """Run the backward pass; return the gradients of all parameters that have one."""
    module.zero_grad()
    loss.backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert grads
    return grads


def in_graph(model: nn.Module, batch: THDBatch) -> Tensor:
    """Run the padded batch that a graph would work on, eagerly."""
    bucket, reason = choose(BUCKETS, batch)
    assert bucket is not None, reason
    return padded_eager(model, batch, bucket)


def padded_eager(module: nn.Module, batch: THDBatch, bucket: Bucket) -> Tensor:
    """Run a batch eagerly, padded to a bucket."""
    with static_shapes():
        return causal_lm_loss(module, pad_batch(batch, bucket))


def worst(tensors: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative difference; small tensors relative to a thousandth of the largest."""
    assert len(tensors) == len(expected) > 0
    norms = [float(b.norm()) for b in expected]
    floor = max(1e-3 * max(norms), 1e-30)
    return max(
        float((a - b).norm()) / max(norm, floor) for a, b, norm in zip(tensors, expected, norms, strict=True)
    )


def graphed(module: nn.Module, function: Any = causal_lm_loss, **kwargs: Any) -> GraphedStep:
    """A graphed step that records on the CPU and raises what cannot be captured."""
    defaults: dict[str, Any] = {"buckets": BUCKETS, "backend": RecordingBackend(), "require": True}
    return GraphedStep(function, module, **{**defaults, **kwargs})


class GraphModule(L.LightningModule):
    """Trains the tiny model; its step touches nothing but tensors."""

    def __init__(self, *, dropout: float = 0.0, dtype: torch.dtype = torch.float64, lr: float = 0.3) -> None:
        super().__init__()
        self.model = tiny_llama(dtype)
        if dropout:
            self.model.model.layers[0].mlp = nn.Sequential(
                self.model.model.layers[0].mlp, nn.Dropout(dropout)
            )
        self.lr = lr
        self.best = float("nan")
        self.outputs: list[float] = []
        self.events: list[str] = []

    def training_step(self, batch: THDBatch, batch_idx: int) -> dict[str, Tensor]:
        batch = batch[0] if isinstance(batch, list) else batch
        loss = causal_lm_loss(self.model, batch)
        self.log("train/loss", loss.detach(), on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"train/twice": 2 * loss, "train/constant": 0.25}, on_step=True, on_epoch=False)
        return {"loss": loss, "tokens": (batch.targets != -100).sum()}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.events.append("start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(float(outputs["loss"]))
        self.events.append(f"end {int(outputs['tokens'])}")

    def on_after_backward(self) -> None:
        self.events.append("backward")

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.log("val/loss", causal_lm_loss(self.model, batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


__all__ = ["BUCKETS", "LONGEST", "VOCAB", "GraphModule", "random_batch"]
