"""The loss without logits: memory, time, error and collectives, beside every pure-torch peer.

``python -m benchmarks.loss`` takes T = 8,192 tokens of H = 1,024 against vocabularies of 32,000, in fp32
and bf16, and of 151,936 in bf16, forward and backward (ten minutes on two idle cores); ``--quick`` takes
2,048 tokens against 32,000. At 151,936 the naive loss is left out, whose logits alone are 15 GB: its memory
is then what they need. Peak memory is everything torch's allocator
handed out between the call and the end of the backward pass, the gradients of hidden and weight included.
Times are the best of the profiled and ``--repeat`` further runs. The peers: F.cross_entropy on whole
logits; torch's linear_cross_entropy under each of its policies; liger-kernel's algorithm in pure torch
(its own needs Triton).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks import loss_objectives
from benchmarks.loss_peers import PEERS, ChunkedLogprobs
from benchmarks.results import Result, faster, less
from lightning_thd.loss import fused_linear_cross_entropy, fused_linear_logprobs

MIB = 2**20
TOKENS, WIDTH = 8192, 1024
# Wanted: peak of ours as a share of the naive one's; time as a multiple of the fastest peer's.
MEMORY_GOAL = {32_000: 1 / 12, 151_936: 1 / 18}
SLOW = ("torch, auto", "torch, per token")  # never the fastest peer: left out unless asked for
TIME_GOAL = {"scalar loss": 1.1, "log-probs alone": 1.35, "log-probs + entropy": 1.4}
# Times that ours may take of naive's, whose gradients need one product less.
NAIVE_GOAL = {"scalar loss": 1.0, "log-probs alone": 1.0, "log-probs + entropy": 1.15}


def scalar(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Our loss, forward and backward."""
    fused_linear_cross_entropy(hidden, weight, targets).backward()


def with_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Our log-probabilities and entropy, forward and backward."""
    results = fused_linear_logprobs(hidden, weight, targets)
    (results.logp.sum() + 0.01 * results.entropy.sum()).backward()


def without_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Our log-probabilities alone, forward and backward."""
    fused_linear_logprobs(hidden, weight, targets, entropy=False).logp.sum().backward()


OURS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "scalar loss": scalar,
    "log-probs alone": without_entropy,
    "log-probs + entropy": with_entropy,
}


def verdict(result: Result) -> str:
    """The word behind a goal."""
    return "met" if result.met else "MISSED"


def peak_bytes(run: Callable[[], None]) -> int:
    """Most bytes torch's CPU allocator had handed out at once, above those at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        run()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def operands(tokens: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets as a trained model's head sees them: logits of a few units."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, WIDTH) * 0.05).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (tokens,))


@dataclass(slots=True)
class Best:
    """The least of every run: other processes only ever add."""

    peak_mib: float = math.inf
    clock_s: float = math.inf
    processor_s: float = math.inf

    def run(self, way: Callable[..., None], inputs: tuple[Tensor, Tensor, Tensor], *, memory: bool) -> None:
        """One forward and backward."""

        def once() -> None:
            start, used = time.perf_counter(), time.process_time()
            way(*inputs)
            self.clock_s = min(self.clock_s, time.perf_counter() - start)
            self.processor_s = min(self.processor_s, time.process_time() - used)

        inputs[0].grad = inputs[1].grad = None
        if memory:
            self.peak_mib = peak_bytes(once) / MIB
        else:
            once()
        inputs[0].grad = inputs[1].grad = None


def show_size(tokens: int, vocabulary: int, dtype: torch.dtype, repeat: int, wanted: list[str]) -> None:
    """One table: ours and all peers on one size."""
    name = str(dtype).removeprefix("torch.")
    work = 2e-12 * tokens * WIDTH * vocabulary
    print(f"\nT={tokens} H={WIDTH} V={vocabulary} {name}: floor {3 * work:.2f} TFLOP scalar (6THV), ", end="")
    print(f"{4 * work:.2f} TFLOP recomputed (8THV)")
    print(f"{'':24}{'peak MiB':>10}{'s':>8}{'cpu s':>8}{'TFLOP/s':>9}  against the goals")
    inputs = operands(tokens, vocabulary, dtype)
    logits = tokens * vocabulary * 4 * 3.2
    chosen = {way: run for way, run in {**PEERS, **OURS}.items() if way in wanted}
    found = {way: Best() for way in chosen}
    if "naive" in found and (logits > available_bytes() or vocabulary > 100_000):
        print(f"naive is left out, it needs {logits / 2**30:.0f} GiB: its memory below is 3 x 4TV")
        found["naive"].peak_mib = 3 * 4 * tokens * vocabulary / MIB
        found["naive"].clock_s = found["naive"].processor_s = math.inf
        del chosen["naive"]
    for turn in range(1 + repeat):  # all ways in turn, so that a busy minute hits each
        for way, run in chosen.items():
            found[way].run(run, inputs, memory=turn == 0)
    for way, best in found.items():
        done = (4 if way.startswith("log-probs") else 3) * work
        print(f"{way:24}{best.peak_mib:10.0f}{best.clock_s:8.2f}{best.processor_s:8.2f}", end="")
        print(
            f"{done / best.clock_s:9.3f}", goals(way, tokens, vocabulary, name, found) if way in OURS else ""
        )
    sys.stdout.flush()


def goals(way: str, tokens: int, vocabulary: int, dtype: str, found: dict[str, Best]) -> str:
    """Ours beside naive and the fastest peer."""
    label, precision = f"{way}, V={vocabulary:,}", {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    naive, mine, goal = found["naive"], found[way], TIME_GOAL[way]
    peers = [found[peer] for peer in found if peer in PEERS and peer != "naive"]
    memory, share = naive.peak_mib / mine.peak_mib, 1 / MEMORY_GOAL[vocabulary]
    text = f" memory 1/{memory:.1f} of naive"
    if tokens == TOKENS:  # with fewer, the weight's gradient is most of the memory
        kept = faster(
            f"{label}, memory, naive", mine.peak_mib, naive.peak_mib, "MiB", share, precision=precision
        )
        text += f" (goal 1/{share:.0f} {verdict(kept)})"
    if math.isfinite(naive.clock_s):
        limit = NAIVE_GOAL[way]
        kept = less(
            f"{label}, naive",
            mine.clock_s,
            "s",
            limit * naive.clock_s,
            peer=naive.clock_s,
            precision=precision,
        )
        text += (
            f", time {mine.clock_s / naive.clock_s:.2f} of naive, {mine.processor_s / naive.processor_s:.2f} "
        )
        text += f"by processor time (goal {limit} {verdict(kept)})"
    if peers:
        best = min(peer.clock_s for peer in peers)
        kept = less(f"{label}, fastest peer", mine.clock_s, "s", goal * best, peer=best, precision=precision)
        ratio = mine.clock_s / best
        processors = mine.processor_s / min(peer.processor_s for peer in peers)
        text += f", {ratio:.2f} of the fastest peer (goal {goal} {verdict(kept)}), "
        text += f"{processors:.2f} by processor time"
    return text


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def exact(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities and entropy in fp64 on whole logits; gradients of each output's sum."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_p = (leaves[0] @ leaves[1].T).log_softmax(-1)
    outputs = [log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)]
    gradients = [g for out in outputs for g in torch.autograd.grad(out.sum(), leaves, retain_graph=True)]
    return outputs, gradients


def show_errors(vocabulary: int = 32_000, tokens: int = 256) -> None:
    """Errors against fp64, for fp32 and bf16 inputs."""
    print(f"\nError against fp64, T={tokens} H={WIDTH} V={vocabulary}")
    names = ["d logp/d hidden", "d logp/d weight", "d entropy/d hidden", "d entropy/d weight"]
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, targets = operands(tokens, vocabulary, dtype)
        hidden = (hidden * 4).detach().requires_grad_()  # logits up to 30, as of a confident model
        outputs, gradients = exact(hidden, weight, targets)
        results = fused_linear_logprobs(hidden, weight, targets)
        mine = [
            g
            for out in (results.logp, results.entropy)
            for g in torch.autograd.grad(out.sum(), (hidden, weight), retain_graph=True)
        ]
        (loss,) = torch.autograd.grad(fused_linear_cross_entropy(hidden, weight, targets), weight)
        pairs = [("logp", results.logp, outputs[0]), ("entropy", results.entropy, outputs[1])]
        pairs += list(zip(names, mine, gradients, strict=True))
        pairs += [("scalar loss: d weight", -loss, gradients[1])]
        for name, ours, wanted in pairs:
            error = ((ours.double() - wanted).norm() / wanted.norm()).item()
            goal = ""
            if dtype == torch.float32:
                kept = less(f"relative error of {name}", error, "", 1e-5, precision="fp32")
                goal = f" (goal 1e-5 {verdict(kept)})"
            print(f"  {dtype!s:16}{name:24}{error:10.1e} relative{goal}")
        absolute = (results.logp.double() - outputs[0]).abs().max().item()
        print(f"  {dtype!s:16}{'logp':24}{absolute:10.1e} largest")
        if dtype == torch.bfloat16:
            theirs = None
            if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
                own = F.linear_cross_entropy(hidden, weight, targets, reduction="none")
                theirs = (-own.double() - outputs[0]).abs().max().item()
            kept = less(
                "largest error of a log-probability, torch's own",
                absolute,
                "",
                1e-2,
                peer=theirs,
                precision="bf16",
            )
            peer = "none" if theirs is None else f"{theirs:.1e}"
            print(f"  {'':16}{'torch, per token':24}{peer:>10} largest (ours: goal 1e-2 {verdict(kept)})")


def rank_times(tokens: int, width: int, vocabulary: int) -> dict[str, tuple[float, int]]:
    """Time ours and a set of collectives a chunk on one rank; seconds and collectives of each."""
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) * 0.1).chunk(ranks)[rank].clone().requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    group = dist.group.WORLD

    def ours() -> Tensor:
        return fused_linear_logprobs(hidden, weight, targets, tp_group=group).logp

    def per_chunk(chunk: int) -> Callable[[], Tensor]:
        return lambda: ChunkedLogprobs.apply(hidden, weight, targets, group, chunk)

    ways = {"ours": ours, "a set every 1,024 tokens": per_chunk(1024), "a set every 16 tokens": per_chunk(16)}
    found: dict[str, tuple[float, int]] = {}
    values: list[Tensor] = []
    for name, run in ways.items():
        best, calls = math.inf, 0
        for _ in range(3):
            dist.barrier()
            start = time.perf_counter()
            with CountedCollectives() as count:
                values.append(run())
                values[-1].sum().backward()
            best, calls = min(best, time.perf_counter() - start), count()
        found[name] = (best, calls)
    found["largest difference"] = (max((v - values[0]).abs().max().item() for v in values), 0)
    return found


class CountedCollectives:
    """Count calls of the collectives that both designs use."""

    NAMES = tuple(
        name
        for name in ("all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor")
        if hasattr(dist, name)
    )

    def __enter__(self) -> Callable[[], int]:
        self.number = 0
        self.before = {name: getattr(dist, name) for name in self.NAMES}
        for name, function in self.before.items():
            setattr(dist, name, self._counting(function))
        return lambda: self.number

    def __exit__(self, *_: object) -> None:
        for name, function in self.before.items():
            setattr(dist, name, function)

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return function(*args, **kwargs)

        return call


def show_ranks() -> None:
    """Two and four gloo ranks."""
    from tests.ranks import run_ranks

    tokens, width, vocabulary = 4096, 256, 8192
    for ranks in (2, 4):
        found = run_ranks(rank_times, ranks, tokens, width, vocabulary)[0]
        print(f"\ntp{ranks} on gloo, T={tokens} H={width} V={vocabulary}, one thread a rank")
        label = f"tp{ranks} on gloo"
        less(f"{label}, collectives forward and backward", found["ours"][1], "", 2)
        for chunk in ("1,024", "16"):
            theirs = found[f"a set every {chunk} tokens"][0]
            faster(
                f"{label}, a set every {chunk} tokens", found["ours"][0], theirs, "s", 1.0, precision="fp32"
            )
        for name, (seconds, calls) in found.items():
            text = (
                f"{seconds:.1e}" if name == "largest difference" else f"{seconds:.2f} s, {calls} collectives"
            )
            print(f"  {name:28}{text}")


def sizes(quick: bool) -> Iterator[tuple[int, int, torch.dtype]]:
    """What is measured."""
    for vocabulary in (32_000,) if quick else (32_000, 151_936):
        for dtype in (torch.float32, torch.bfloat16) if vocabulary < 100_000 else (torch.bfloat16,):
            yield 2048 if quick else TOKENS, vocabulary, dtype


def measured(ways: dict[str, loss_objectives.Way], tokens: int) -> dict[str, tuple[float, float]]:
    """Run ways in turn; peak MiB and CPU seconds of each."""
    inputs = operands(tokens, 32_000, torch.float32)
    found = {name: Best() for name in ways}
    for name, way in ways.items():
        found[name].run(way, inputs, memory=True)
    return {name: (best.peak_mib, best.processor_s) for name, best in found.items()}


def gpu() -> Iterator[object]:
    """The parts that need a GPU, as ``benchmarks.gpu`` runs them."""
    from benchmarks import gpu_loss

    yield from gpu_loss.big_head()
    yield from gpu_loss.fp8_products()


def main(argv: list[str] | None = None) -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2,048 tokens, 32,000 columns")
    parser.add_argument("--repeat", type=int, help="runs besides the profiled one: 1, or none at 151,936")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parts = ["errors", "ranks", "sizes", "objectives"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--ways", nargs="+", choices=[*PEERS, *OURS])
    parser.add_argument("--vocabulary", type=int, help="one vocabulary alone")
    parser.add_argument("--dtype", help="one dtype alone: float32 or bfloat16")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads")
    if "errors" in arguments.parts:
        show_errors()
    if "ranks" in arguments.parts:
        show_ranks()
    if "objectives" in arguments.parts:
        tokens = 2048 if arguments.quick else TOKENS // 2
        loss_objectives.show(measured, tokens, not arguments.quick, available_bytes())
    for tokens, vocabulary, dtype in sizes(arguments.quick):
        chosen = arguments.vocabulary in (None, vocabulary) and arguments.dtype in (None, str(dtype)[6:])
        if chosen and "sizes" in arguments.parts:
            repeat = int(vocabulary < 100_000) if arguments.repeat is None else arguments.repeat
            ways = arguments.ways or [way for way in (*PEERS, *OURS) if way not in SLOW]
            show_size(tokens, vocabulary, dtype, repeat, ["naive", *ways])


if __name__ == "__main__":
    main()
