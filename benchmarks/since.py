"""Another checkout's CPU seconds beside this one's: attention, the loss, a training run, the host of a step.

``python -m benchmarks.since CHECKOUT`` starts two processes, one with the package of that checkout and one
with the package of this one; all else is this checkout's in both. They take turns inside every round, and a
ratio is the median of the rounds' own ratios. Goals: 1.03 times for arithmetic, 1.0 for the host's share of a
step. ``python -m benchmarks.since .`` prints by how much two processes of one checkout differ.

Its rows are no part of ``python -m benchmarks``, which knows one checkout.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).parents[1]
ARITHMETIC, HOST = 1.03, 1.0
ROUNDS = 9


def attention(documents: int, dtype: torch.dtype) -> Callable[[], object]:
    """Forward and backward of one call on a pack of 8,192 tokens."""
    from benchmarks.attention import HEADS, SIZE, TOKENS, draw_lengths
    from lightning_thd.attention import varlen_attention

    torch.manual_seed(0)
    lengths = draw_lengths(documents, "random")
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q, k, v = (torch.randn(TOKENS, HEADS, SIZE, dtype=dtype, requires_grad=True) for _ in range(3))

    def run() -> None:
        varlen_attention(q, k, v, offsets, offsets, max(lengths), max(lengths)).sum().backward()

    return run


def loss(dtype: torch.dtype, *, logprobs: bool = False) -> Callable[[], object]:
    """Forward and backward of 2,048 tokens of 1,024 values against 32,000 words."""
    from benchmarks.loss import scalar, with_entropy

    torch.manual_seed(0)
    hidden = torch.randn(2048, 1024, dtype=dtype, requires_grad=True)
    weight = (torch.randn(32_000, 1024) / 32).to(dtype).requires_grad_()
    targets = torch.randint(32_000, (2048,))
    way = with_entropy if logprobs else scalar
    return lambda: way(hidden, weight, targets)


def training() -> Callable[[], object]:
    """Ten steps of a small Llama under Lightning's Trainer, packs of 2,048 tokens."""
    import lightning as L
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_thd import THDDataModule, causal_lm_loss

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=8192,
                hidden_size=256,
                intermediate_size=704,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=4,
                use_cache=False,
            )
            self.model = LlamaForCausalLM._from_config(config, attn_implementation="thd")

        def training_step(self, batch: object, _: int) -> torch.Tensor:
            return causal_lm_loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=True)

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 512, (96,), generator=generator).tolist()
    samples = [{"input_ids": torch.randint(8192, (n,), generator=generator)} for n in lengths]

    def run() -> None:
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=10,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), THDDataModule(samples, capacity=2048))

    return run


def host(way: str) -> Callable[[], float]:
    """The median CPU seconds of a step that is mostly Python, see ``benchmarks.host_time``."""
    from benchmarks.host_time import step_us

    return lambda: step_us(way) * 1e-6


# What is run, by name: how to make it, and the most that it may cost beside the other checkout.
JOBS: dict[str, tuple[Callable[[], Callable[[], object]], float]] = {
    "attention, 16 documents, fp32": (lambda: attention(16, torch.float32), ARITHMETIC),
    "attention, 512 documents, fp32": (lambda: attention(512, torch.float32), ARITHMETIC),
    "attention, 16 documents, bf16": (lambda: attention(16, torch.bfloat16), ARITHMETIC),
    "attention, 512 documents, bf16": (lambda: attention(512, torch.bfloat16), ARITHMETIC),
    "loss, fp32": (lambda: loss(torch.float32), ARITHMETIC),
    "loss, bf16": (lambda: loss(torch.bfloat16), ARITHMETIC),
    "log-probs and entropy, fp32": (lambda: loss(torch.float32, logprobs=True), ARITHMETIC),
    "log-probs and entropy, bf16": (lambda: loss(torch.bfloat16, logprobs=True), ARITHMETIC),
    "ten steps of training, fp32": (training, ARITHMETIC),
    "host time of a step": (lambda: host("ours"), HOST),
    "host time of a step, with the monitor": (lambda: host("ours, with the monitor"), HOST),
}


class Checkout:
    """A process that runs jobs with the package of one checkout, when it is told to."""

    def __init__(self, path: Path, folder: Path) -> None:
        package = path.resolve() / "lightning_thd"
        if not package.is_dir():
            raise SystemExit(f"{path} has no folder lightning_thd. Pass the folder of a checkout.")
        folder.mkdir()
        (folder / "lightning_thd").symlink_to(package)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.since", "--serve"],
            env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def seconds(self, job: str) -> float:
        """Run a job once and return its CPU seconds."""
        assert self._stdin is not None
        assert self._stdout is not None
        print(job, file=self._stdin, flush=True)
        line = self._stdout.readline()
        if not line:
            raise SystemExit(f"{job!r} failed in a process; its traceback stands above.")
        return float(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """Run the job that each line of the standard input names, and answer its CPU seconds."""
    # What a job prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    import lightning.pytorch  # noqa: F401 - sets the level of its logger

    import lightning_thd

    for name in ("lightning.pytorch", "lightning_thd"):
        logging.getLogger(name).setLevel(logging.ERROR)

    print(f"The package is {Path(lightning_thd.__file__).resolve().parent}.", file=sys.stderr)
    ready: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in ready:
            ready.clear()  # the tensors of the job before are not kept
            ready[name] = JOBS[name][0]()
        begin = time.process_time()
        measured = ready[name]()
        seconds = time.process_time() - begin
        print(measured if isinstance(measured, float) else seconds, file=answers, flush=True)


def compare(checkout: Path, rounds: int, wanted: list[str]) -> int:
    """Print the table and return how many goals were missed."""
    names = [name for name in JOBS if not wanted or any(part in name for part in wanted)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        pair = [Checkout(checkout, Path(folder, "old")), Checkout(ROOT, Path(folder, "new"))]
        print(f"{'CPU milliseconds':<40}{'other':>10}{'this':>10}{'ratio':>8}{'goal':>7}")
        for name in names:
            for process in pair:
                process.seconds(name)  # warm up

            times: list[list[float]] = [[], []]
            for turn in range(rounds):
                # Whoever comes second finds warmer caches of the machine: they change places.
                first = turn % 2
                for which in (first, 1 - first):
                    times[which].append(pair[which].seconds(name))

            ratio = median(new / old for old, new in zip(*times, strict=True))
            goal = JOBS[name][1]
            missed += ratio > goal
            old, new = (1e3 * median(of_one) for of_one in times)
            print(f"{name:<40}{old:>10.2f}{new:>10.2f}{ratio:>8.3f}{goal:>7}", flush=True)
        for process in pair:
            process.close()
    return missed


def main(argv: list[str] | None = None) -> None:
    """Compare, or serve one of the two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, help="the folder of the other checkout")
    parser.add_argument("--jobs", nargs="*", default=[], help="parts of names")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve()
        return
    if args.checkout is None:
        parser.error("name the folder of another checkout")
    raise SystemExit(1 if compare(args.checkout, args.rounds, args.jobs) else 0)


if __name__ == "__main__":
    main()
