"""The same claims on a CUDA device, where memory pools, streams and real kernels take part."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_thd import THDBatch, THDDataModule, causal_lm_loss
from lightning_thd._static import static_shapes
from lightning_thd.callbacks.cuda_graph import CUDAGraphCallback, GraphedStep, make_buckets
from lightning_thd.cuda_graph.buckets import choose
from tests.cuda_graph.support import GraphModule, pad_batch, random_batch, worst
from tests.device_reads import ON_GPU
from tests.tiny import checkpoint_activations, quiet_trainer, sequences

pytestmark = ON_GPU
BUCKETS = make_buckets((12, 20), slots=1024, max_seqlen=128)
# Two eager runs differ as well: the backward of flash attention adds in the order its blocks finish. bf16 has
# 8 bits, and a gradient is a sum of some hundred rounded terms.
BF16 = 2e-2


def model() -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    built = AutoModelForCausalLM.from_config(config, attn_implementation="thd")
    return built.to("cuda", torch.bfloat16).train()


def batch_of(seed: int, **kwargs: Any) -> THDBatch:
    return random_batch(seed, longest=128, **kwargs).to("cuda")


def step_of(module: nn.Module, **kwargs: Any) -> GraphedStep:
    step = GraphedStep(causal_lm_loss, module, buckets=BUCKETS, require=True, **kwargs)
    step._find_slower = lambda *_, **__: None  # type: ignore[method-assign]  # tiny steps may be no faster
    return step


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor]:
    module.zero_grad()
    loss.backward()
    return [p.grad.float() for p in module.parameters() if p.grad is not None]


def test_fifty_layouts_equal_padded_eager() -> None:
    module = model()
    step = step_of(module)
    used = set()

    for seed in range(50):
        batch = batch_of(seed, count=1 + seed % 24)
        bucket, _ = choose(BUCKETS, batch)
        used.add(bucket)
        waste = [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(8)]
        del waste  # what comes into freed memory must reach no gradient
        loss = step(batch)
        replayed = gradients(module, loss)
        # A captured step multiplies all rows; an eager one leaves out those without a target.
        with static_shapes() if bucket else contextlib.nullcontext():
            eager = causal_lm_loss(module, pad_batch(batch, bucket) if bucket else batch)
        assert torch.equal(loss, eager)
        assert worst(replayed, gradients(module, eager)) < BF16
        assert torch.allclose(loss, causal_lm_loss(module, batch), rtol=1e-2)

    assert used == {*BUCKETS, None}
    assert step.stats.replays > 20


def test_gradients_under_autocast_and_checkpointing_are_those_of_eager() -> None:
    """Parameters in fp32, products in bf16, norms and rotary embeddings in fp32; backward outside of it."""
    module = model().float()
    checkpoint_activations(module)
    step = step_of(module)
    for seed in range(4):
        batch = batch_of(seed, count=6)
        with torch.autocast("cuda", torch.bfloat16):
            loss = step(batch)
        replayed = gradients(module, loss)
        with torch.autocast("cuda", torch.bfloat16), static_shapes():
            eager = causal_lm_loss(module, pad_batch(batch, BUCKETS[0]))
        assert torch.equal(loss, eager)
        # Less than the 1e-3 that a backward cast once more is off by; flash attention adds in any order.
        assert worst(replayed, gradients(module, eager)) < 5e-4
    assert step.stats.replays == 4


def test_dropout_differs_from_replay_to_replay() -> None:
    module = model()
    module.model.layers[0].mlp = nn.Sequential(module.model.layers[0].mlp, nn.Dropout(0.3))
    step = step_of(module)
    batch = batch_of(1, count=6)
    losses = []
    for _ in range(4):
        loss = step(batch)
        loss.backward()
        losses.append(float(loss.detach()))
    assert len(set(losses)) == 4
    assert step.stats.replays == 4


def reads(module: nn.Module, batch: THDBatch) -> Tensor:
    loss = causal_lm_loss(module, batch)
    return loss * (1.0 if loss.item() > 0 else 2.0)


def test_a_failed_capture_leaves_the_device_usable_and_names_the_line() -> None:
    module = model()
    batch = batch_of(1, count=6)
    step = GraphedStep(reads, module, buckets=BUCKETS)
    with pytest.warns(UserWarning, match=r"test_gpu.py:\d+ in reads"):
        loss = step(batch)
    loss.backward()
    assert torch.equal(loss, reads(module, batch))
    torch.rand(3, device="cuda")  # the generator draws outside of captures
    after = step_of(module)
    assert torch.allclose(after(batch), loss, rtol=1e-2)
    assert after.stats.replays == 1


class Broken:
    """Breaks a capture where no warm-up can tell: pageable memory goes to the device only then."""

    def __init__(self) -> None:
        self.host = torch.ones(1024)

    def __call__(self, module: nn.Module, batch: THDBatch) -> Tensor:
        loss = causal_lm_loss(module, batch)
        if torch.cuda.is_current_stream_capturing():
            loss = loss + 0.0 * loss.new_tensor(float(loss.detach()))
        return loss


def test_a_capture_that_breaks_at_its_end_leaves_allocator_and_generator_usable() -> None:
    module = model()
    batch = batch_of(1, count=6)
    step = GraphedStep(Broken(), module, buckets=BUCKETS)

    with pytest.warns(UserWarning, match=r"CUDA graphs are off.*test_gpu.py:\d+ in __call__"):
        loss = step(batch)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()

    loss.backward()
    assert bool(torch.rand(8, device="cuda").isfinite().all())

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    reserved = []

    for _ in range(50):  # memory that several streams use comes back only while no capture is underway
        x = torch.ones(1 << 22, device="cuda")
        with torch.cuda.stream(side):
            x.record_stream(side)  # type: ignore[no-untyped-call]
        del x
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())

    assert reserved[-1] == reserved[5]
    after = step_of(module)
    assert torch.allclose(after(batch), causal_lm_loss(module, batch), rtol=1e-2)
    assert after.stats.replays == 1


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL")
def test_ddp_keeps_the_nodes_of_parameters_and_capture_does_not_meet_them(tmp_path: Path) -> None:
    """One rank is enough: DDP makes the nodes that accumulate gradients where it is built."""
    store: Any = {"init_method": f"file://{tmp_path}/store", "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("nccl", **store, device_id=torch.device("cuda", 0))

    try:
        module = model()
        eager = model()
        wrapped = DistributedDataParallel(module, device_ids=[0])
        step = step_of(wrapped)
        for seed in range(4):
            batch = batch_of(seed, count=6)
            module.zero_grad()
            step(batch).backward()
            replayed = [p.grad.float() for p in module.parameters() if p.grad is not None]
            assert worst(replayed, gradients(eager, causal_lm_loss(eager, batch))) < BF16
        assert step.stats.replays == 4
    finally:
        torch.distributed.destroy_process_group()


def test_memory_is_level_over_a_thousand_steps() -> None:
    module = model()
    step = step_of(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    reserved = []
    for k in range(1000):
        step(batch_of(k % 40, count=1 + k % 10)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if k in (100, 999):
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] <= reserved[0]
    assert step.stats.hit_rate > 0.5
    step.close()


def fit(graphs: bool, path: Path, *, resume: Path | None = None, precision: Any = "bf16-mixed") -> Any:
    callback = CUDAGraphCallback(max_sequences=(24, 40), require=True)
    module = GraphModule(dtype=torch.float32, lr=0.05)
    trainer = quiet_trainer(
        max_steps=8,
        accelerator="gpu",
        precision=precision,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        val_check_interval=4,
        callbacks=[callback] if graphs else [],
    )

    data = THDDataModule(sequences(600), val=sequences(30, seed=1), capacity=256)
    trainer.fit(module, data, ckpt_path=resume, weights_only=False)
    trainer.save_checkpoint(path / f"{graphs}.ckpt")
    return module, callback


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_fit_with_validation_and_scaling_is_the_same(tmp_path: Path, precision: str) -> None:
    graphed, callback = fit(True, tmp_path, precision=precision)
    expected, _ = fit(False, tmp_path, precision=precision)
    assert graphed.events == expected.events
    assert graphed.outputs == pytest.approx(expected.outputs, rel=2e-2)
    assert callback.stats.replays + callback.stats.fallbacks["slower"] > 8
    resumed, _ = fit(True, tmp_path, resume=tmp_path / "True.ckpt", precision=precision)
    assert resumed.outputs == []  # all steps were done
