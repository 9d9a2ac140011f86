"""``lightning-thd plan`` and ``graph-plan``: a data set -> the expected packs, balance, speed and graphs."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import get_args

import numpy as np

from lightning_thd.cli.arguments import Parser, load_config, picture, share, whole
from lightning_thd.cli.peaks import nearest_device
from lightning_thd.cuda_graph.graph_choice import plan_for
from lightning_thd.data import THDDataModule
from lightning_thd.flops import FlopsModel, SeqStats, peak_flops
from lightning_thd.packing import Cost, Packs, Sequences
from lightning_thd.packing.entries import Oversize
from lightning_thd.report.terminal import Table, show_table

_METADATA = "keys of conversations that may be dropped"
_MFU = 0.4  # the MFU that is assumed for a device's speed if --mfu is not given


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The statistics that ``lightning-thd plan`` expects for training, from an epoch's first steps."""

    steps: int  # steps of an epoch
    packs: int  # packs of the planned steps; fields below describe these, unless they name the data set
    sequences: int
    tokens: int  # real tokens; a shared prefix counts for every sequence
    lengths: tuple[int, int, int]  # tokens of the shortest, median and longest sequence
    fill: float  # computed tokens / slots
    padded_fill: float  # real tokens / slots, if batches of 8 sequences were padded
    imbalance: float  # the slowest rank's work / the mean of the ranks, averaged over steps
    tokens_per_s: float | None  # speed of one device at the assumed MFU; None without a device
    mfu: float | None  # the assumed MFU; None without a device
    lost: dict[str, int]  # sequences of the data set that policies left out or changed, and tokens_lost
    documents: int  # number of documents in the data set
    distinct: int  # computed tokens; with shared prefixes, fewer than ``tokens``
    patches: int = 0  # patches of all images
    most_patches: int = 0  # patches of the microbatch with the most patches
    vision: float | None = None  # the vision tower's share of the work; None without a model

    def table(self) -> Table:
        """Build the table that ``lightning-thd plan`` prints."""
        rows = [
            ("optimizer steps an epoch", f"{self.steps:,}"),
            ("packs looked at", f"{self.packs:,}"),
            ("sequences in them", f"{self.sequences:,}"),
            ("tokens in them", f"{self.tokens:,}"),
        ]
        if self.distinct != self.tokens:
            distinct = f"{self.distinct:,} ({self.distinct / self.tokens:.1%})"
            rows.append(("distinct tokens, computed", distinct))

        share = 1 - self.padded_fill * self.distinct / (self.fill * self.tokens)
        saved = f"{share:.1%}" if share >= 0 else "none: fuller if padded"
        rows += [
            ("shortest / median / longest", " / ".join(f"{n:,}" for n in self.lengths)),
            ("fill of packs", f"{self.fill:.1%}"),
            ("fill of padded batches of 8", f"{self.padded_fill:.1%}"),
            ("slots saved by packing", saved),
            ("slowest rank / mean work", f"{self.imbalance:.3f}"),
        ]

        if self.patches:
            rows.append(("image patches / most in a pack", f"{self.patches:,} / {self.most_patches:,}"))
        if self.patches and self.vision is not None:
            rows.append(("vision tower's share of the work", f"{self.vision:.1%}"))
        if self.tokens_per_s is not None:
            rows.append(("tokens/s of one device", f"{self.tokens_per_s:,.0f}"))
            rows.append(("its MFU, assumed (--mfu)", f"{self.mfu:.0%}"))
        for name, count in self.lost.items():
            label = name.replace("_", " ")
            if name != "tokens_lost":
                label = f"sequences: {label}"
            if count:
                rows.append((label, f"{count:,}"))
        return Table(columns=("", ""), rows=rows)


def plan(arguments: Sequence[str]) -> None:
    """Print the expected statistics of training on a data set, or with ``--memory`` the memory of a step.

    ``--plot`` also draws the packs.
    """
    if "--memory" in arguments:
        from lightning_thd.cli.memory_plan import memory_plan

        memory_plan(arguments)
        return

    parser = plan_parser()
    options = parser.parse_args(list(arguments))
    if options.theme is not None and options.plot is None:
        parser.error(f"--theme {options.theme} sets the drawing's colours. Pass --plot too.")

    expected, packs, shared = plan_data(options)
    split = expected.lost.get("split", 0)
    if split > expected.documents / 2:
        sys.stderr.write(
            f"Warning: --capacity {options.capacity} splits {split:,} of {expected.documents:,} documents: "
            "only a document's first piece sees its start. Raise --capacity, or pass --oversize truncate.\n"
        )
    if options.json:
        sys.stdout.write(json.dumps(asdict(expected)) + "\n")
    else:
        show_table(expected.table())

    if options.plot:
        from lightning_thd.report.packs import draw_packs

        figure = draw_packs(packs[:16], options.capacity, held=shared[:16], theme=options.theme or "light")
        figure.savefig(options.plot, dpi=120)
        if not options.json:
            sys.stdout.write(f"Picture: {options.plot}\n")


def plan_data(options: argparse.Namespace) -> tuple[Expected, list[list[int]], list[list[int]]]:
    """Plan an epoch's first steps; return statistics and, by pack, sequences' lengths and shared tokens."""
    model = None if options.model is None else FlopsModel.from_config(load_config(options.model))
    flops_per_s = _flops_per_s(options.device, options.mfu, model)
    cost = Cost() if model is None else Cost.from_flops(model, longest=options.capacity)
    data = _data_module(options, cost)
    loader = data.train_steps()
    assert loader.planner is not None, "a path is not a stream"
    planner = loader.planner

    plans = [planner.step(0, k, options.dp) for k in range(min(len(planner), options.steps))]
    spans = [pack for plan in plans for rank in plan.spans_by_rank() for pack in rank]
    packs = [pack.lengths.tolist() for pack in spans]
    shared = [planner.held(pack.index).tolist() for pack in spans]
    lengths = sorted(length for pack in packs for length in pack)
    computed = [sum(pack) - sum(held) for pack, held in zip(packs, shared, strict=True)]
    # A sequence above the capacity has its own pack.
    slots = sum(max(options.capacity, tokens) for tokens in computed)

    rank_work = [plan.work.sum(axis=1) for plan in plans]
    work = float(sum(ranks.sum() for ranks in rank_work))
    patches = sum(int(plan.patches.sum()) for plan in plans)
    text_work = work
    if patches:
        text_work = sum(float(cost(plan.spans.lengths).sum()) for plan in plans)
    tokens_per_s = None
    if model is not None and flops_per_s is not None:
        tokens_per_s = _speed(packs, shared, model, flops_per_s, vision=work - text_work)

    expected = Expected(
        sequences=len(lengths),
        tokens=sum(lengths),
        distinct=sum(computed),
        lengths=(lengths[0], int(np.median(lengths)), lengths[-1]),
        steps=len(planner),
        packs=len(packs),
        fill=sum(computed) / slots,
        padded_fill=_padded_fill(packs),
        imbalance=float(np.mean([ranks.max() / ranks.mean() for ranks in rank_work])),
        tokens_per_s=tokens_per_s,
        mfu=None if flops_per_s is None else options.mfu or _MFU,
        lost=dict(data.counts["train"]),
        documents=len(data._sets["train"].index.lengths),
        patches=patches,
        most_patches=max(int(plan.microbatch_patches.max()) for plan in plans),
        vision=None if model is None or not work else 1 - text_work / work,
    )
    return expected, packs, shared


def _data_module(options: argparse.Namespace, cost: Cost) -> THDDataModule:
    """Make the data module that ``lightning-thd plan`` plans, and count its data."""
    oversize = options.oversize
    if oversize is None:
        oversize = "error" if options.share_prefixes else "split"

    data = THDDataModule(
        options.data,
        capacity=options.capacity,
        global_batch=Packs(options.dp) if options.sequences is None else Sequences(options.sequences),
        oversize=oversize,
        share_prefixes=options.share_prefixes,
        text_key=options.text_key,
        metadata_keys=options.metadata_keys,
        tokenizer=options.tokenizer,
        processor=options.processor,
        max_patches=options.max_patches,
        cost=cost,
    )

    data.attach(ranks=options.dp)
    data.prepare_data()
    data.setup("fit")
    return data


def _padded_fill(packs: Sequence[Sequence[int]], rows: int = 8) -> float:
    """Return real tokens / slots if batches of ``rows`` sequences were padded to their longest one."""
    flat = [length for pack in packs for length in pack]
    random.Random(0).shuffle(flat)  # neighbours in a pack may have similar lengths
    batches = [flat[start : start + rows] for start in range(0, len(flat), rows)]
    slots = sum(len(batch) * max(batch) for batch in batches)
    return sum(flat) / slots


def _flops_per_s(device: str | None, mfu: float | None, model: FlopsModel | None) -> float | None:
    """Return the expected bf16 FLOP/s of a device, peak times MFU; None without a device."""
    if device is None:
        if mfu is not None:
            raise ValueError(f"--mfu {mfu:g} is for the speed of a device. Pass --device too.")
        return None
    if model is None:
        raise ValueError(f"--device {device} is for a speed, which depends on the model. Pass --model too.")
    peak = peak_flops(device, "bf16")
    if peak is None:
        raise ValueError(
            f"No peak FLOP/s is known for {device!r}{nearest_device(device)} "
            "`lightning-thd peaks` lists the known devices."
        )
    return peak * (_MFU if mfu is None else mfu)


def _speed(
    packs: Sequence[Sequence[int]],
    shared: Sequence[Sequence[int]],
    model: FlopsModel,
    flops_per_s: float,
    *,
    vision: float,
) -> float:
    """Return tokens per second, counting all copies of a shared prefix; ``vision``: the FLOPs of images."""
    lengths = [length for pack in packs for length in pack]
    prefix_lengths = [length for pack in shared for length in pack]
    stats = SeqStats.from_lengths(lengths, prefix_lengths=prefix_lengths, windows=model.windows)
    return flops_per_s * sum(lengths) / (model.training_flops(stats).model + vision)


def plan_parser() -> argparse.ArgumentParser:
    """Build the command's argument parser."""
    parser = Parser(
        "lightning-thd plan",
        description="What training on a data set will look like: packs, balance, padding avoided, speed.",
        epilog="example: lightning-thd plan texts.jsonl --capacity 8192 --dp 8 --plot packs.png. "
        "`lightning-thd plan --memory --help` explains the plan of a step's memory, which needs no data.",
    )
    parser.add_argument("data", help="a path for THDDataModule: .jsonl, .parquet, text, a folder")
    parser.add_argument("--capacity", type=whole(1), required=True, help="largest number of slots of a pack")
    parser.add_argument("--dp", type=whole(1), default=1, help="data-parallel ranks (default: 1)")
    parser.add_argument("--sequences", type=whole(1), help="sequences per step, global_batch=Sequences(n)")
    parser.add_argument("--steps", type=whole(1), default=50, help="number of steps to plan (default: 50)")
    parser.add_argument(
        "--oversize",
        choices=get_args(Oversize),
        metavar="WAY",
        help=f"what to do with longer documents: {', '.join(get_args(Oversize))} (default: split; "
        "error with --share-prefixes and in THDDataModule)",
    )
    parser.add_argument("--share-prefixes", action="store_true", help="compute common prefixes once")

    parser.add_argument("--text-key", default="text", help="key of the text in a record (default: text)")
    parser.add_argument("--metadata-keys", nargs="+", default=(), metavar="KEY", help=_METADATA)
    parser.add_argument("--tokenizer", help="name or path of a Hugging Face tokenizer; UTF-8 bytes without")
    parser.add_argument("--processor", help="folder of a Hugging Face processor, for chats with images")
    parser.add_argument("--max-patches", type=whole(1), help="largest number of image patches of a pack")

    parser.add_argument("--model", help="a config.json, for FLOPs and speed")
    parser.add_argument("--device", help="a device of `lightning-thd peaks`, for the expected speed")
    parser.add_argument("--mfu", type=share, help=f"assumed MFU, for the expected speed (default: {_MFU})")

    parser.add_argument("--plot", type=picture, help="draw the first packs into this file")
    parser.add_argument("--theme", choices=("light", "dark"), help="colours of the drawing (light)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def graph_plan(arguments: Sequence[str]) -> None:
    """Print which CUDA graphs are worth a capture for a data set; this needs no GPU."""
    parser = Parser(
        "lightning-thd graph-plan",
        description="Choose the buckets of CUDAGraphCallback for a data set, with assumed costs of a replay.",
        epilog="example: lightning-thd graph-plan texts.jsonl --capacity 8192",
    )
    parser.add_argument("data", help="a path for THDDataModule: .jsonl, .parquet, text, a folder")
    parser.add_argument("--capacity", type=whole(1), default=8192, help="slots of a pack")
    parser.add_argument("--text-key", default="text", help="the key of the text in a JSONL object")
    parser.add_argument("--metadata-keys", nargs="+", default=(), metavar="KEY", help=_METADATA)
    parser.add_argument("--tokenizer", help="name or path of a Hugging Face tokenizer; UTF-8 bytes without")
    parser.add_argument(
        "--max-sequences", type=whole(1), nargs="+", metavar="N", help="sequences of your buckets, to compare"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(list(arguments))

    data = THDDataModule(
        options.data,
        capacity=options.capacity,
        oversize="truncate",
        empty="drop",
        text_key=options.text_key,
        metadata_keys=options.metadata_keys,
        tokenizer=options.tokenizer,
    )
    data.prepare_data()
    data.setup("fit")
    planner = data.train_steps().planner
    assert planner is not None, "a path is not a stream"
    graphs = plan_for(planner, given=options.max_sequences or ())
    text = json.dumps(asdict(graphs)) if options.json else graphs.table()
    sys.stdout.write(f"{text}\n")
