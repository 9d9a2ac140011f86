"""FLOPs of compiled models without a config: a formula's, or no MFU and the reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_thd import (
    CUDAGraphCallback,
    FlopsModel,
    THDBatch,
    THDDataModule,
    causal_lm_loss,
    varlen_attention,
)
from lightning_thd.callbacks import THDThroughputMonitor
from lightning_thd.loss import fused_linear_cross_entropy
from lightning_thd.warnings import MeasureWarning
from tests.tiny import quiet_trainer, sequences, tiny_llama

# torch's compiler asks every tensor for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

VOCAB = 31
SIZE = 8
HEADS = 2
LAYERS = 2


class Block(nn.Module):
    """Attention and an MLP; ``checkpointed`` blocks run again in backward, ``squared`` ones multiply rows."""

    def __init__(self, *, checkpointed: bool, squared: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(SIZE, 3 * SIZE, bias=False)
        self.out = nn.Linear(SIZE, SIZE, bias=False)
        self.mlp = nn.Sequential(nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE))
        self.checkpointed = checkpointed
        self.squared = squared

    def forward(self, x: Tensor, batch: THDBatch) -> Tensor:
        if self.checkpointed:
            out: Tensor = checkpoint(self.mixed, x, batch, use_reentrant=False)
            return out
        return self.mixed(x, batch)

    def mixed(self, x: Tensor, batch: THDBatch) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(1)
        x = x + self.out(varlen_attention(q, k, v, batch.boundaries).flatten(1))
        if self.squared:  # products that grow with the square of the slots
            # Half of the slots as keys, because all slots by all slots have a message of their own.
            part = x[:, :4]
            mixed = torch.matmul(torch.matmul(part, part[::2].T) / x.shape[0], part[::2])
            x = x + nn.functional.pad(mixed, (0, SIZE - 4))
        return x + self.mlp(x)


class Gpt(nn.Module):
    """A small model of one's own; its forward returns the loss, summed over the targets."""

    def __init__(self, *, fused: bool = False, checkpointed: bool = False, squared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCAB, SIZE)
        self.blocks = nn.ModuleList(
            [Block(checkpointed=checkpointed, squared=squared) for _ in range(LAYERS)]
        )
        self.head = nn.Linear(SIZE, VOCAB, bias=False)
        self.fused = fused

    def hidden(self, batch: THDBatch) -> Tensor:
        x: Tensor = self.tokens(batch.input_ids)
        for block in self.blocks:
            x = block(x, batch)
        return x

    def forward(self, batch: THDBatch) -> Tensor:
        x = self.hidden(batch)
        if self.fused:
            return fused_linear_cross_entropy(x, self.head.weight, batch.targets)
        return F.cross_entropy(self.head(x), batch.targets, reduction="sum")


def by_hand(lengths: Sequence[int]) -> int:
    """Return the training FLOPs of a step: 6 a weight and token, and the pairs of causal attention."""
    weights = LAYERS * (3 * SIZE + SIZE + 4 * SIZE + 4 * SIZE) * SIZE + SIZE * VOCAB
    pairs = sum(query + 1 for length in lengths for query in range(length))
    return 6 * weights * sum(lengths) + 3 * LAYERS * 4 * SIZE * pairs


def compile_layers(model: Gpt, backend: Any) -> None:
    for block in model.blocks:
        block.compile(dynamic=True, backend=backend)


def compile_method(model: Gpt, backend: Any) -> None:
    model.hidden = torch.compile(model.hidden, dynamic=True, backend=backend)


def compile_whole(model: Gpt, backend: Any) -> None:
    model.compile(dynamic=True, backend=backend)


COMPILED: dict[str, Callable[[Gpt, Any], None]] = {
    "layers": compile_layers,
    "method": compile_method,
    "whole": compile_whole,
}


def packs() -> list[THDBatch]:
    """Return packs of different lengths."""
    all_lengths = [(5, 3), (9, 2, 4), (7, 7), (3, 4, 5, 6), (11, 2), (6, 8, 3)]
    return [
        THDBatch.collate([{"input_ids": [1 + i % 30 for i in range(length)]} for length in lengths])
        for lengths in all_lengths
    ]


def trained(step: Callable[[THDBatch], Tensor], model: nn.Module) -> THDThroughputMonitor:
    """Run a backward pass on each pack under a monitor, and return the monitor."""
    monitor = THDThroughputMonitor(peak=1e12, causal="exact", every_n_steps=1)
    monitor.watch(model, capacity=32)
    for batch in packs():
        with monitor.step(batch):
            step(batch).backward()
    monitor.finish()
    return monitor


def total_by_hand() -> int:
    return sum(by_hand(batch.lengths) for batch in packs())


def present_stance() -> str:
    """Return what torch.compile's switch is set to, and leave it so."""
    switch: Any = torch.compiler.set_stance("default")
    with switch:
        pass
    return str(switch.prev.stance)


@pytest.fixture(autouse=True)
def _no_compiled_code_of_other_tests() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("part", COMPILED)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_models_count_as_by_hand_and_compile_once(backend: str, part: str, fused: bool) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor on a CPU needs g++")
    compiler = CompileCounterWithBackend(backend)
    model = Gpt(fused=fused)
    COMPILED[part](model, compiler)
    graphs = list[int]()

    def step(batch: THDBatch) -> Tensor:
        loss: Tensor = model(batch)
        graphs.append(compiler.frame_count)
        return loss

    monitor = trained(step, model)
    assert monitor.latest["train/total_flops"] == total_by_hand()
    assert monitor.latest["train/packing/attention_fraction"] > 0
    # The first two packs are counted, uncompiled. The third compiles, and no later one does.
    assert graphs[:2] == [0, 0]
    assert graphs[2] > 0
    assert set(graphs[2:]) == {graphs[2]}


def test_a_compiled_loss_function_and_checkpoints_count_as_by_hand() -> None:
    model = Gpt(checkpointed=True)
    monitor = trained(torch.compile(model, dynamic=True, backend="aot_eager"), model)
    assert monitor.latest["train/total_flops"] == total_by_hand()

    compile_layers(model, "aot_eager")
    assert trained(model, model).latest["train/total_flops"] == total_by_hand()


def test_from_module_counts_compiled_layers() -> None:
    batch = packs()[1]
    counts = []
    for compiled in (False, True):
        model = Gpt()
        if compiled:
            compile_layers(model, "aot_eager")
        flops = FlopsModel.from_module(model, lambda: model(batch).backward(), stats=batch.stats)  # noqa: B023
        counts.append(flops.training_flops(batch.stats))
    assert counts[0] == counts[1]
    assert counts[1].attention > 0


class Module(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch) * batch.loss_scale
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Lengths(L.Callback):
    """Adds up what the steps of a fit cost by hand."""

    def __init__(self) -> None:
        self.flops = 0

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: THDBatch, index: int
    ) -> None:
        self.flops += by_hand(batch.lengths)


def fit(model: nn.Module, *callbacks: L.Callback, **options: Any) -> tuple[THDThroughputMonitor, int]:
    """Return the monitor of a fit, and its FLOPs by hand."""
    monitor = THDThroughputMonitor(peak=1e12, causal="exact", every_n_steps=1)
    lengths = Lengths()
    rows = [{"input_ids": [i % VOCAB for i in row["input_ids"]]} for row in sequences(60)]
    trainer = quiet_trainer(max_steps=6, callbacks=[monitor, lengths, *callbacks], **options)
    trainer.fit(Module(model), THDDataModule(rows, capacity=64))
    return monitor, lengths.flops


@pytest.mark.parametrize("strategy", ["thd_ddp", "thd_model_parallel"])
def test_a_trainer_with_a_strategy_and_accumulation_counts_compiled_layers(strategy: str) -> None:
    model = Gpt()
    compile_layers(model, "aot_eager")
    monitor, flops = fit(model, strategy=strategy, devices=1, accumulate_grad_batches=2)
    assert monitor.latest["train/total_flops"] == flops


def test_a_transformers_model_of_an_unknown_family_counts_the_same_compiled() -> None:
    totals = []
    for compiled in (False, True):
        model = tiny_llama(torch.float32)
        model.config.model_type = "nobody_knows"
        if compiled:
            for layer in model.model.layers:
                layer.compile(dynamic=True, backend="aot_eager")
        monitor = trained(partial(causal_lm_loss, model), model)
        totals.append(monitor.latest["train/total_flops"])

    weights = sum(child.weight.numel() for child in model.modules() if isinstance(child, nn.Linear))
    tokens = sum(sum(batch.lengths) for batch in packs())
    assert totals[0] == totals[1] > 6 * weights * tokens


def test_graphs_wait_while_the_first_steps_are_counted() -> None:
    graphs = CUDAGraphCallback(backend="recording", max_sequences=12, require=True)
    monitor, flops = fit(Gpt(), graphs)
    assert monitor.latest["train/total_flops"] == flops
    assert graphs.stats.fallbacks["watched"] == 2
    assert graphs.stats.replays > 0


def test_the_stance_of_a_user_is_kept() -> None:
    """One that is set around the run, and one that is set inside a counted step."""
    model = Gpt()
    with torch.compiler.set_stance("eager_on_recompile"):
        trained(model, model)
        assert present_stance() == "eager_on_recompile"
    assert present_stance() == "default"

    def step(batch: THDBatch) -> Tensor:
        torch.compiler.set_stance("fail_on_recompile")
        loss: Tensor = model(batch)
        return loss

    try:
        trained(step, model)
        assert present_stance() == "fail_on_recompile"
    finally:
        torch.compiler.set_stance("default")

    def fails(batch: THDBatch) -> Tensor:
        raise RuntimeError("a step that fails")

    with pytest.raises(RuntimeError, match="a step that fails"):
        trained(fails, model)
    assert present_stance() == "default"


def has_flops(monitor: THDThroughputMonitor) -> bool:
    return any("mfu" in key or "flops" in key for key in monitor.latest)


def test_code_that_compiles_in_a_counted_step_logs_no_mfu() -> None:
    model = Gpt()
    compile_layers(model, "aot_eager")

    def step(batch: THDBatch) -> Tensor:
        with torch.compiler.set_stance("default"):
            loss: Tensor = model(batch)
        return loss

    with pytest.warns(MeasureWarning, match="ran compiled or from a CUDA graph in a counted step") as caught:
        monitor = trained(step, model)
    assert len(caught) == 1
    assert not has_flops(monitor)


def test_a_compiled_model_whose_every_step_had_to_be_counted_logs_no_mfu() -> None:
    model = Gpt(squared=True)
    compile_layers(model, "aot_eager")
    with pytest.warns(MeasureWarning, match="not proportional to the slots: matmul took .*do not compile"):
        monitor = trained(model, model)
    kept = monitor.latest["train/total_flops"]
    with monitor.step(packs()[0]):
        model(packs()[0]).backward()
    assert "train/device/mfu" not in monitor._close(monitor._meter("train"), last=True)
    assert monitor.latest["train/total_flops"] == kept


class Cross(nn.Module):
    """Attention to the first token of each sequence, whose lengths only the call knows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, SIZE)
        self.kv = nn.Linear(SIZE, 2 * SIZE)

    def forward(self, batch: THDBatch) -> Tensor:
        x = self.tokens(batch.input_ids)
        cu = batch.cu_seqlens
        k, v = self.kv(x[cu[:-1].long()]).unflatten(-1, (2, HEADS, -1)).unbind(1)
        firsts = torch.arange(cu.shape[0], dtype=torch.int32)
        q = x.unflatten(-1, (HEADS, -1))
        out = varlen_attention(q, k, v, cu, firsts, batch.max_seqlen, 1, causal=False)
        return out.square().sum()


def test_cross_attention_in_compiled_code_logs_no_mfu() -> None:
    model = Cross()
    eager = trained(model, model)
    tokens = sum(sum(batch.lengths) for batch in packs())
    firsts = sum(len(batch.lengths) for batch in packs())
    assert eager.latest["train/total_flops"] == 6 * firsts * 2 * SIZE * SIZE + 3 * 4 * SIZE * tokens

    model.compile(dynamic=True, backend="aot_eager")
    with pytest.warns(MeasureWarning, match="cross-attention, runs compiled or from a CUDA graph"):
        trained(model, model)
