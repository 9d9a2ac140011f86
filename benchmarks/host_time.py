"""Host time of a training step, ours against plain Lightning with "sdpa" on a padded row of as many tokens.

``python -m benchmarks.host_time`` trains one small Llama both ways, where Python and dispatch are most of a
step: hidden size 32, 12 layers, 64 tokens, one thread. The figure is the CPU time of the process from the end
of one step to the end of the next, data loading included. The ways take turns, and the ratio is the median of
the rounds' own ratios. Goals: 1.2 times the plain step, 1.25 times with the throughput monitor.

``--imagined`` does so on the imagined GPU of ``tests/imagined``, in bf16, against transformers' own
flash-attention path, with a stand-in for flash-attn that calls the same operator. Its collator flattens the
same sequences in the loop, as ours packs them there; a second row shows it without that work. The figure is
then the CPU time in Python frames of the main thread, without those of operators and of the imagined device.
Goals: 0.95 times, 1.0 times with the monitor.

``--cuda`` does the same on a real GPU, where such a step is bound by the host: the figure is wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import logging
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

from benchmarks.results import less
from lightning_thd import THDDataModule, THDThroughputMonitor, causal_lm_loss

TOKENS, PADDING, PART = 64, 8, 24
STEPS, WARM = 80, 20
GOALS = {"ours": 1.2, "ours, with the monitor": 1.25}
PLAIN = "plain Lightning, sdpa"
IMAGINED_GOALS = {"ours": 0.95, "ours, with the monitor": 1.0}
FLASH = "plain Lightning, flash-attn"
READY = "the same, rows flattened before"


def config() -> LlamaConfig:
    """Return a Llama so small that arithmetic hardly counts."""
    return LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )


class Timed(L.LightningModule):
    """The CPU seconds at the end of every step."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM._from_config(config(), attn_implementation=attention)
        self.ends: list[float] = []
        self.clock = time.process_time

    def on_train_batch_end(self, *_: Any) -> None:
        """Read the clock."""
        self.ends.append(self.clock())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the cheapest optimizer."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, foreach=True)


class Packed(Timed):
    """A user's module with packs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return our loss."""
        return causal_lm_loss(self.model, batch)


class Padded(Timed):
    """A user's module with a padded row and the model's own loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the model's loss."""
        loss: Tensor = self.model(**batch).loss
        return loss


def rows() -> DataLoader[Any]:
    """Return padded rows of one sequence."""
    ids = torch.arange(TOKENS)
    mask = (ids < TOKENS - PADDING).long()
    row = {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}
    return DataLoader([row] * (STEPS + WARM), batch_size=1)  # type: ignore[arg-type]


def sequences() -> list[dict[str, Any]]:
    """Return sequences of two lengths, of which two fill a pack."""
    lengths = (PART, TOKENS - PART) * (STEPS + WARM)
    return [{"input_ids": torch.arange(n)} for n in lengths]


def packs() -> THDDataModule:
    """Return the sequences as packs."""
    return THDDataModule(sequences(), capacity=TOKENS)


def flat_rows() -> DataLoader[Any]:
    """Return the same packs as rows that transformers' collator flattens."""
    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return DataLoader(sequences(), batch_size=2, collate_fn=flatten, pin_memory=True)  # type: ignore[arg-type]


def ready_rows() -> DataLoader[Any]:
    """Return the same rows, which were flattened before the training."""
    rows = [*flat_rows()]
    return DataLoader(rows, batch_size=None, pin_memory=True)  # type: ignore[arg-type]


class InFrames(L.Callback):
    """The seconds of a step in Python frames of the main thread, without those of the imagined device."""

    def __init__(self) -> None:
        self._profile, self._steps = cProfile.Profile(time.thread_time), 0

    def on_train_batch_end(self, *_: Any) -> None:
        """Begin after the first steps."""
        self._steps += 1
        if self._steps == WARM:
            self._profile.enable()

    def on_train_end(self, *_: Any) -> None:
        """End the measurement."""
        self._profile.disable()

    def seconds(self) -> float:
        """Return the mean of a step."""
        rows: Any = self._profile.getstats()
        found = [row for row in rows if isinstance(row.code, types.CodeType)]
        own = [row.inlinetime for row in found if "/imagined/" not in row.code.co_filename]
        return sum(own) / (self._steps - WARM)


@contextlib.contextmanager
def flash_attn() -> Iterator[None]:
    """Give transformers a flash-attn whose function of packed sequences calls torch's operator."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import modeling_flash_attention_utils as utils

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        assert causal
        longest, scale = (max_seqlen_q, max_seqlen_k), softmax_scale
        out: Any = varlen_attn(
            q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, scale=scale, window_size=(-1, 0)
        )
        return out

    found = (varlen, varlen, None, utils._pad_input, utils._unpad_input)
    with mock.patch.object(utils, "_lazy_imports", return_value=found):
        yield


def imagined_us(name: str) -> float:
    """Return the CPU microseconds of a step in Python frames, on an imagined GPU."""
    frames = InFrames()
    on_gpu(name, frames)
    return frames.seconds() * 1e6


def cuda_us(name: str) -> float:
    """Return the median microseconds of a step on a real GPU."""
    module = on_gpu(name)
    return median(b - a for a, b in pairwise(module.ends[WARM:])) * 1e6


def on_gpu(name: str, *callbacks: L.Callback) -> Timed:
    """Train one of the ways on a GPU."""
    data = {FLASH: flat_rows, READY: ready_rows}.get(name, packs)
    plain = data is not packs
    module = Padded("sdpa") if plain else Packed("thd")
    module.clock = time.perf_counter
    if plain:
        module.model.config._attn_implementation_internal = "flash_attention_2"
    train(module, data(), name, "gpu", *callbacks)
    return module


def step_us(name: str) -> float:
    """Return the median CPU microseconds of a step."""
    plain = name == PLAIN
    module = Padded("sdpa") if plain else Packed("thd")
    train(module, rows() if plain else packs(), name, "cpu")
    return median(b - a for a, b in pairwise(module.ends[WARM:])) * 1e6


def train(module: Timed, data: Any, name: str, accelerator: str, *callbacks: L.Callback) -> None:
    """Train for ``WARM + STEPS`` steps."""
    monitor = [THDThroughputMonitor(peak=1e12)] if "monitor" in name else []
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator=accelerator,
            precision="32-true" if accelerator == "cpu" else "bf16-true",
            devices=1,
            max_steps=STEPS + WARM,
            callbacks=[*monitor, *callbacks],
            logger=CSVLogger(folder) if monitor else False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data)


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--imagined", action="store_true", help="on the imagined GPU")
    parser.add_argument("--cuda", action="store_true", help="on a real GPU, in wall time")
    args = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if args.cuda:
        with flash_attn():
            table(cuda_us, FLASH, IMAGINED_GOALS, args.rounds, READY)
        return
    if not args.imagined:
        table(step_us, PLAIN, GOALS, args.rounds)
        return
    from tests.imagined.gpu import imagined_gpu

    with imagined_gpu(), flash_attn():
        table(imagined_us, FLASH, IMAGINED_GOALS, args.rounds, READY)


def table(
    measure: Callable[[str], float], plain: str, goals: dict[str, float], rounds: int, *others: str
) -> None:
    """Measure in turns and print the ratios to the plain way; ``others`` have no goal."""
    found: dict[str, list[float]] = {name: [] for name in (plain, *others, *goals)}
    for _ in range(rounds):
        for name, times in found.items():
            times.append(measure(name))

    print(f"{'':<34}{'us a step':>14}{'ratio':>8}{'goal':>6}")
    print(f"{plain:<34}{median(found[plain]):>14,.0f}")
    for name in (*others, *goals):
        ratio = median(a / b for a, b in zip(found[name], found[plain], strict=True))
        print(f"{name:<34}{median(found[name]):>14,.0f}{ratio:>8.3f}{goals.get(name, ''):>6}")
        if name in goals:
            less(f"host time of a step, {name}, times {plain}", ratio, "", goals[name])


if __name__ == "__main__":
    main()
