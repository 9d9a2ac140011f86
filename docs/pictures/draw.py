"""Draw the pictures of the documentation: PYTHONPATH=. python docs/pictures/draw.py."""

import json
import re
from pathlib import Path

import numpy as np
from matplotlib.ticker import LogLocator

from benchmarks.figures import one_b
from lightning_thd.packing import PackPlanner, Sequences, pack_lengths
from lightning_thd.parallel.pipeline import make_schedule
from lightning_thd.parallel.pipeline.schedule import timeline
from lightning_thd.report.look import (
    CYCLE,
    Theme,
    dress,
    legend,
    look_of,
    new_figure,
    short,
)
from lightning_thd.report.packs import draw_packs, draw_work

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks" / "results.json"
# Inches: a page of 400 pixels shows its width, and letters of 8 points have 8 pixels.
PHONE = 5.0


def main() -> None:
    rng = np.random.default_rng(0)
    # The chat distribution of the benchmarks: lognormal, mean 600, 16 to 4,096 tokens.
    lengths = np.clip(
        rng.lognormal(np.log(600) - 0.5, 1.0, 4_096).astype(np.int64), 16, 4_096
    )
    packing = pack_lengths(lengths[:140], 8_192)
    packs = [
        lengths[pack].tolist()
        for pack in np.split(packing.indices, packing.offsets[1:-1])
    ]
    for pack in packs:
        rng.shuffle(pack)
    planner = PackPlanner(lengths, 8_192, global_batch=Sequences(512))
    planned = [
        sum(work(lengths[pack]) for pack in rank)
        for rank in planner.step(0, 0, 8).indices_by_rank()
    ]
    naive = [work(part) for part in np.array_split(lengths[:512], 8)]
    for theme in ("light", "dark"):
        figure = draw_packs(packs[:10], 8_192, theme=theme, width=6.4)
        figure.savefig(HERE / f"packs-{theme}.png", dpi=150)
        work_figure = draw_work(naive, planned, theme=theme)
        work_figure.set_size_inches(6.4, 3.0)  # readable on phones too
        work_figure.axes[0].set_xticks(range(8))
        work_figure.savefig(HERE / f"work-{theme}.png", dpi=140)
        draw_speed(theme).savefig(HERE / f"speed-{theme}.png", dpi=140)
        draw_training(theme).savefig(HERE / f"training-{theme}.png", dpi=140)
        for name, chunks in (("1f1b", 1), ("interleaved", 2)):
            draw_passes(chunks, theme).savefig(
                HERE / f"passes-{name}-{theme}.png", dpi=140
            )
        for name in GALLERY:
            draw_example(name, theme).savefig(
                HERE / f"example-{name}-{theme}.png", dpi=105
            )


def work(lengths: np.ndarray) -> float:
    """Count a small dense model's linear parts and squares."""
    return float((lengths * (4_096 + lengths)).sum())


def draw_speed(theme: Theme) -> object:
    """Draw the seconds of attention and of planning, ours and the fastest peer's."""
    found = {one["name"]: one["results"] for one in json.loads(RESULTS.read_text())}
    figure = new_figure(PHONE, 2.6, theme)
    both = zip(
        figure.subplots(1, 2),
        (
            (
                r"(\d+) equal documents, forward and b.*",
                "attention",
                "documents",
                "SDPA in a loop",
            ),
            (r"plan ([\d,]+), long@8k, TRL", "packing", "documents", "TRL"),
        ),
        strict=True,
    )
    for axes, (pattern, name, x, peer) in both:
        rows = [
            (int(match[1].replace(",", "")), row["ours"], row["peer"])
            for row in found[name]
            if row["precision"] != "bf16" and (match := re.match(pattern, row["what"]))
        ]
        numbers, ours, theirs = zip(*sorted(rows), strict=True)
        axes.plot(numbers, ours, marker="o", color=CYCLE[0], label="ours")
        axes.plot(numbers, theirs, marker="s", color=CYCLE[1], label=peer)
        dress(axes, theme, title=f"{name} [s]", x=x)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(numbers, [f"{number:,}" for number in numbers])
        subs = (1, 2, 5) if max(theirs) < 10 * min(ours) else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_major_formatter(short)
        axes.minorticks_off()
        legend(axes, theme)
    return figure


def draw_training(theme: Theme) -> object:
    """Draw the tokens a second of training 1B parameters, from GPU.md."""
    ways = {
        "padded": "padded rows, SDPA",
        "flattened": "flattened, flash-attn 2",
        "packs": "our packs",
        "graphs": "our packs, CUDA graphs",
    }
    figure = new_figure(PHONE, 2.8, theme)
    for axes, machine in zip(figure.subplots(1, 2), ("H200", "H100"), strict=True):
        rates = one_b(machine)
        for row, (way, label) in enumerate(ways.items()):
            rate = rates.get(way, 0.0)
            colour = CYCLE[0] if way in ("packs", "graphs") else CYCLE[1]
            axes.barh(row, rate, color=colour, height=0.55)
            figures = f"{rate:,.0f}" if rate else "out of memory"
            axes.text(
                400,
                row - 0.42,
                f"{label}: {figures}",
                color=look_of(theme).ink,
                fontsize=8,
                va="center",
            )
        dress(axes, theme, title=f"1B on one {machine}", x="tokens/s", grid=False)
        axes.set_yticks([])
        axes.set_ylim(len(ways) - 0.6, -0.8)
        axes.xaxis.set_major_formatter(short)
    return figure


def draw_passes(chunks: int, theme: Theme) -> object:
    """Draw the passes of a step on four ranks: eight microbatches of equal work."""
    schedule, look = make_schedule(4, 8, chunks=chunks), look_of(theme)
    lines = timeline(schedule, lambda stage, microbatch: 1 / chunks)
    assert lines is not None
    figure = new_figure(6.4, 1.9, theme)
    axes = figure.add_subplot()
    for rank, line in enumerate(lines):
        for op, start, end in line:
            # Light on full blue, dark on full orange; lighter bars are near the paper.
            digit = look_of("dark" if op.forward else "light").ink
            axes.barh(
                rank,
                end - start,
                left=start,
                height=0.86,
                color=CYCLE[0] if op.forward else CYCLE[1],
                # Passes through a rank's later stage are lighter.
                alpha=1 - 0.45 * op.chunk,
                edgecolor=look.paper,
            )
            axes.text(
                (start + end) / 2,
                rank,
                op.microbatch + 1,
                color=digit if op.chunk == 0 else look.ink,
                fontsize=6,
                ha="center",
                va="center",
            )
    for colour, label in ((CYCLE[0], "forward"), (CYCLE[1], "backward")):
        axes.barh(0, 0, color=colour, label=label)
    waits = f"ranks wait {schedule.bubble:.0%} of the step"
    dress(axes, theme, title=waits, x="time, in forward passes", grid=False)
    axes.set_yticks(range(4), [f"rank {rank}" for rank in range(4)])
    axes.set_xlim(0, 35)
    axes.invert_yaxis()
    legend(axes, theme, ncols=2, loc="lower right", bbox_to_anchor=(1, 0.95))
    return figure


# The lanes of each example's picture: (length, role), and the colour of each role.
PROMPT, LEARNED, IMAGE, EMPTY = "read", "learned", "image", "empty"
GALLERY = {
    "quickstart": [[(3, "a"), (5, "b"), (2, "c")], [(6, "a"), (4, "b")]],
    "chat_sft": [
        [(2, PROMPT), (3, LEARNED), (1, PROMPT), (4, LEARNED)],
        [(4, PROMPT), (2, LEARNED), (2, PROMPT), (1, LEARNED), (1, EMPTY)],
    ],
    "vision_language": [
        [(4, IMAGE), (1, PROMPT), (2, LEARNED), (2, IMAGE), (1, LEARNED)]
    ],
    "vision_chat": [
        [(3, IMAGE), (2, PROMPT), (1, LEARNED), (1, PROMPT), (3, LEARNED)],
        [(2, IMAGE), (2, IMAGE), (2, PROMPT), (2, LEARNED), (2, EMPTY)],
    ],
    "preference": [[(2, PROMPT), (3, "chosen"), (2, PROMPT), (3, "rejected")]],
    "rl_logprobs": [
        [(2, PROMPT), (3, "response"), (5, EMPTY)],
        [(1, PROMPT), (6, "response"), (3, EMPTY)],
        [(2, PROMPT), (3, "response"), (1, PROMPT), (4, "response")],
    ],
    "grpo": [
        [(4, PROMPT), (2, "answer A"), (2, "answer B"), (2, "answer C")],
    ],
    "distillation": [
        [(5, "teacher"), (5, "teacher")],
        [(5, "student"), (5, "student")],
    ],
    "parallel": [
        [(1, f"rank {rank}") for rank in (0, 1, 2, 3, 3, 2, 1, 0)],
    ],
    "ray_train": [
        [(4, "worker 0"), (1, EMPTY), (5, "worker 0")],
        [(4, "worker 1"), (1, "dies"), (5, "worker 1")],
    ],
    "accelerate_loop": [[(5, "rank 0"), (4, "rank 0")], [(6, "rank 1"), (3, "rank 1")]],
    "fabric_loop": [[(4, "rank 0"), (5, "rank 0")], [(3, "rank 1"), (6, "rank 1")]],
    "hf_trainer": [[(3, "a"), (4, "b"), (3, "c")]],
    "hybrid_mamba": [[(4, "state of a"), (3, "state of b"), (3, "state of c")]],
    "own_module": [
        [(3, "a"), (7, EMPTY)],
        [(3, EMPTY), (5, "b"), (2, EMPTY)],
        [(8, EMPTY), (2, "c")],
    ],
    "one_step_by_hand": [[(3, "a"), (5, "b"), (2, EMPTY)]],
    "fp8": [[(9, "FP8"), (1, "bf16")]],
}


def draw_example(name: str, theme: Theme) -> object:
    """Draw the packs of an example as lanes, one colour a role."""
    lanes, look = GALLERY[name], look_of(theme)
    roles = list(
        dict.fromkeys(role for lane in lanes for _, role in lane if role != EMPTY)
    )
    figure = new_figure(4.6, 0.7 + 0.35 * len(lanes), theme)
    axes = figure.add_subplot()
    for row, lane in enumerate(lanes):
        at = 0
        for length, role in lane:
            colour = (
                look.padding if role == EMPTY else CYCLE[roles.index(role) % len(CYCLE)]
            )
            axes.barh(row, length, left=at, color=colour, edgecolor=look.paper)
            at += length
    for i, role in enumerate(roles):
        axes.barh(0, 0, color=CYCLE[i % len(CYCLE)], label=role)
    dress(axes, theme, title="", x="", grid=False)
    axes.invert_yaxis()
    axes.set_axis_off()
    legend(axes, theme, ncols=len(roles), loc="lower left", bbox_to_anchor=(0, 1))
    return figure


if __name__ == "__main__":
    main()
