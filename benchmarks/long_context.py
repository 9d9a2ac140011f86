"""The peak memory of a step on a long sequence, with and without tiles, checkpoints and offload.

``python -m benchmarks.long_context`` counts a step of a Llama (8 layers, hidden 1,024, intermediate 4,096, 16
heads, vocabulary 260, bf16) on one sequence of 32,768 tokens. Tensors are fake, on an imagined GPU, so no
operator computes anything, and the peak is the largest sum of bytes that tensors on the device held at once,
without the weights. Gradients of weights count. Beside it are the bytes that ``lightning_thd.memory``
predicts, without the weights too; they may be a tenth apart. Goal of the options: at most half of what the
plain step holds. Times are CPU seconds of real steps of a smaller model (2 layers, hidden 256, 4,096 tokens,
fp32); the ways take turns.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.clock import take_turns
from benchmarks.results import less
from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.loss import fused_linear_cross_entropy
from lightning_thd.memory import MemoryModel, Training
from lightning_thd.models import prepare

TOKENS, TILE = 32_768, 2_048
GOAL = 1 / 2
APART = 0.1  # of what is counted, from the prediction
_GB = 10**9
# The name of a way -> its options: a tile, activation checkpoints, layer inputs in CPU memory.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tiles": {"mlp_tile": TILE},
    "checkpoints": {"checkpointing": True},
    "tiles, checkpoints": {"mlp_tile": TILE, "checkpointing": True},
    "tiles, checkpoints, offload": {"mlp_tile": TILE, "checkpointing": True, "offload": True},
}


def config_of(*, layers: int, hidden: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        vocab_size=260,
        max_position_embeddings=TOKENS,
    )


def model_of(
    config: LlamaConfig,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    mlp_tile: int | None = None,
    checkpointing: bool = False,
    offload: bool | None = None,
) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM._from_config(config, attn_implementation="thd", dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    prepared: nn.Module = prepare(model.train(), mlp_tile=mlp_tile, offload=offload)
    return prepared


class Held(TorchDispatchMode):
    """Counts the bytes of tensors on the device that live, and the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        outputs = found if isinstance(found, tuple | list) else [found]
        for output in outputs:
            if isinstance(output, Tensor) and output.device.type == "cuda":
                self.add(output)
        self.peak = max(self.peak, self.now)
        return found

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's memory, once, until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self.now += size
        self._seen[key] = weakref.ref(storage, lambda _: self._free(key, size))

    def _free(self, key: int, size: int) -> None:
        del self._seen[key]
        self.now -= size


def loss_of_fakes(model: Any, batch: THDBatch) -> Tensor:
    """Compute the loss that ``causal_lm_loss`` computes, whose stand-in for logits cannot be fake."""
    hidden = model.model(**batch.hf_kwargs()).last_hidden_state[0]
    tokens = batch.loss_tokens
    return fused_linear_cross_entropy(hidden, model.lm_head.weight, batch.targets, loss_tokens=tokens)


def peak_of(tokens: int, **options: Any) -> int:
    """Return the most bytes that one forward and backward pass holds beside the weights."""
    from tests.imagined.gpu import imagined_gpu

    held = Held()
    # A build of torch for CPUs has no such kernel for a GPU, and would run it as eight operators.
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("silu_backward", lambda gradient, x: torch.empty_like(x), "CUDA")
    with imagined_gpu(), mock.patch("torch.cuda.is_current_stream_capturing", return_value=False):
        # The batch is real, because collating reads values; operators on it give fake tensors.
        batch = THDBatch.collate([{"input_ids": torch.zeros(tokens, dtype=torch.int64)}]).to("cuda")
        with FakeTensorMode(allow_non_fake_inputs=True):
            config = config_of(layers=8, hidden=1_024)
            model = model_of(config, device="cuda", dtype=torch.bfloat16, **options)
            for weight in model.parameters():
                held.add(weight)
            of_weights = held.now
            with held:
                loss_of_fakes(model, batch).backward()
        return held.peak - of_weights


def predicted(tokens: int, **options: Any) -> int:
    """Return what the memory model predicts of the forward and backward pass, without the weights."""
    memory = MemoryModel.from_config(config_of(layers=8, hidden=1_024))
    training = Training(precision="bf16-true", optimizer="sgd", **options)
    _, parts = memory.at_peak(tokens, training)
    return parts.total - parts.weights


def seconds(rounds: int) -> dict[str, Any]:
    """Time real steps of a smaller model; the ways take turns."""
    ids = torch.randint(0, 260, (4_096,))
    batch = THDBatch.collate([{"input_ids": ids}])

    def step(model: nn.Module) -> None:
        model.zero_grad()
        causal_lm_loss(model, batch).backward()

    ways: dict[str, Callable[[], None]] = {}
    for name, options in WAYS.items():
        if "offload" not in options:  # which does nothing on a CPU
            ways[name] = partial(step, model_of(config_of(layers=2, hidden=256), **options))
    found: dict[str, Any] = take_turns(ways, rounds)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=5, help="of the times; 0 leaves them out")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    peaks = {name: peak_of(given.tokens, **options) for name, options in WAYS.items()}
    print(f"{'way':<30}{'GB held':>9}{'of plain':>10}{'predicted':>11}")
    for name, peak in peaks.items():
        share = peak / peaks["plain"]
        prediction = predicted(given.tokens, **WAYS[name])
        print(f"{name:<30}{peak / _GB:>9.2f}{share:>10.2f}{prediction / _GB:>11.2f}")
        away = abs(prediction / peak - 1.0)
        less(f"{name}: memory, prediction from count", away, "apart", APART, precision="bf16")
        if name != "plain":
            what = f"{name}: memory of a step, 8 layers, 1 x {given.tokens:,} tokens, by count"
            less(what, share, "of plain", GOAL if "tiles, " in name else 1.0, precision="bf16")
    if given.rounds:
        times = seconds(given.rounds)
        for name, own in times.items():
            print(f"{name:<30}{own.cpu_s:>8.2f} CPU s {own.wall_s / times['plain'].wall_s:>6.2f} of plain")
            if name != "plain":
                limit = 1.6  # a checkpoint runs the forward pass twice, which is a third of a step
                what = f"{name}: time of a step, 2 layers, 1 x 4,096 tokens"
                less(what, own.cpu_s / times["plain"].cpu_s, "of plain", limit, precision="fp32")


if __name__ == "__main__":
    main()
