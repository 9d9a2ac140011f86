"""``lightning-thd plan --memory``: a config, a capacity and options -> a step's memory, and what fits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

from lightning_thd.cli.arguments import Parser, load_config, whole
from lightning_thd.memory import CARDS_GB, USABLE, MemoryModel, Optimizer, Parts, Precision, Training
from lightning_thd.report.terminal import Table, show_table

_GB = 10**9
_TILE = 2_048  # the tile of the options that are compared, unless --mlp-tile gives one
_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "inputs": "inputs of layers",
    "attention": "attention",
    "mlp": "MLPs and experts",
    "norms": "norms",
    "loss": "loss",
    "buffers": "buffers",
}


def memory_plan(arguments: Sequence[str]) -> None:
    """Print the memory of one step by parts, the cards that hold it, and what other options would need."""
    options = memory_parser().parse_args(list(arguments))
    model = MemoryModel.from_config(load_config(options.model))
    training = training_of(options)
    cards = tuple(options.card or CARDS_GB)
    if options.json:
        sys.stdout.write(json.dumps(_as_json(model, options.capacity, training, cards)) + "\n")
        return

    moment, parts = model.at_peak(options.capacity, training)
    rows = [(name, f"{getattr(parts, part) / _GB:,.2f} GB") for part, name in _PARTS.items()]
    rows.append(("at most", f"{parts.total / _GB:,.2f} GB"))
    sys.stdout.write(f"{model.num_weights:,} weights, {training.devices} devices, on each of them:\n")
    show_table(Table(columns=("", ""), rows=rows))
    sys.stdout.write(f"at this moment: {moment}\n\n")
    show_table(_table_of_options(model, options.capacity, training, cards))


def room_of(card_gb: float) -> int:
    """Return the bytes of a card that a step may fill: ``room_of(80)`` is 73,600,000,000."""
    return int(card_gb * _GB * USABLE)


def options_of(training: Training) -> Iterator[tuple[str, Training]]:
    """Yield ways to train the same model in less memory, each with its name."""
    yield "as given", training
    checkpointed = replace(training, checkpointing=True)
    tiled = replace(checkpointed, mlp_tile=training.mlp_tile or _TILE)
    ways = {
        "--checkpointing": checkpointed,
        f"--checkpointing --mlp-tile {tiled.mlp_tile}": tiled,
        f"--checkpointing --mlp-tile {tiled.mlp_tile} --offload": replace(tiled, offload=True),
        "--lora-rank 16 and these": replace(tiled, offload=True, lora_rank=training.lora_rank or 16),
    }
    if not (training.sharded and training.data > 1):
        ways["--fsdp --dp 8 and the first two"] = replace(tiled, sharded=True, data=max(8, training.data))
    yield from ((name, way) for name, way in ways.items() if way != training)


def training_of(options: argparse.Namespace) -> Training:
    """Return how the command's arguments train a model."""
    return Training(
        precision=options.precision,
        optimizer=options.optimizer,
        checkpointing=options.checkpointing or options.offload,
        mlp_tile=options.mlp_tile,
        offload=options.offload,
        lora_rank=options.lora_rank,
        data=options.dp,
        sharded=options.fsdp,
        context=options.cp,
        tensor=options.tp,
        pipeline=options.pp,
        accumulates=options.accumulates,
    )


def _table_of_options(model: MemoryModel, capacity: int, training: Training, cards: Sequence[float]) -> Table:
    """Build a table of the ways to train: the peak of each, and what fits on each card."""
    rows = []
    for name, way in options_of(training):
        largest = [model.largest_capacity(room_of(card), way) for card in cards]
        fits = [_fit(capacity, most) for most in largest]
        rows.append((name, f"{model.peak(capacity, way) / _GB:,.1f} GB", *fits))
    columns = ("", "peak", *(f"{card:g} GB" for card in cards))
    foot = (
        f"A number is the largest capacity that the card holds, in brackets if it is below {capacity:,}; - "
        "means that no capacity fits."
    )
    return Table(columns=columns, rows=rows, foot=foot)


def _fit(capacity: int, largest: int) -> str:
    """Return the largest capacity that fits, in brackets if it is below ``capacity``; "-" if none does."""
    if not largest:
        return "-"
    if largest < capacity:
        return f"({largest:,})"
    return f"{largest:,}"


def _as_json(model: MemoryModel, capacity: int, training: Training, cards: Sequence[float]) -> dict[str, Any]:
    """Return the plan as the object that ``--json`` prints."""

    def on_cards(way: Training, peak: int) -> list[dict[str, Any]]:
        return [
            {
                "gb": card,
                "fits": peak <= room_of(card),
                "largest_capacity": model.largest_capacity(room_of(card), way),
            }
            for card in cards
        ]

    moment, parts = model.at_peak(capacity, training)
    ways = {name: (way, model.peak(capacity, way)) for name, way in options_of(training)}
    moments: dict[str, Parts] = model.moments(capacity, training)
    return {
        "capacity": capacity,
        "weights": model.num_weights,
        "devices": training.devices,
        "peak_bytes": parts.total,
        "moment": moment,
        "parts": asdict(parts),
        "moments": {name: parts_then.total for name, parts_then in moments.items()},
        "options": [
            {"option": name, "peak_bytes": peak, "cards": on_cards(way, peak)}
            for name, (way, peak) in ways.items()
        ],
    }


def memory_parser() -> argparse.ArgumentParser:
    """Build the parser of ``lightning-thd plan --memory``."""
    parser = Parser(
        "lightning-thd plan --memory",
        description="The memory of one step on each device: its peak by parts, and which options fit a card.",
        epilog="example: lightning-thd plan --memory --model config.json --capacity 131072 --fsdp --dp 8",
    )

    parser.add_argument("--memory", action="store_true", required=True, help="predict memory; reads no data")
    parser.add_argument("--model", required=True, help="a config.json, a folder with one, or a model's name")
    parser.add_argument(
        "--capacity", type=whole(1), default=8192, help="largest number of slots of a pack (8192)"
    )
    parser.add_argument(
        "--precision",
        choices=get_args(Precision),
        default="bf16-true",
        help="of Lightning's Trainer (bf16-true); bf16-mixed holds twice the bytes of weights and states",
    )
    parser.add_argument("--optimizer", choices=get_args(Optimizer), default="adamw", help="(adamw)")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing of all layers")
    parser.add_argument("--mlp-tile", type=whole(1), metavar="N", help="prepare(model, mlp_tile=N)")
    parser.add_argument(
        "--offload", action="store_true", help="checkpointed inputs wait in CPU memory; --checkpointing too"
    )

    parser.add_argument("--lora-rank", type=whole(1), metavar="R", help="LoRA in all projections of layers")
    parser.add_argument("--dp", type=whole(1), default=1, help="data-parallel ranks (1)")
    parser.add_argument("--fsdp", action="store_true", help="shard weights and states over dp and cp ranks")
    parser.add_argument(
        "--cp", type=whole(1), default=1, help="context-parallel ranks, which share a pack (1)"
    )
    parser.add_argument("--tp", type=whole(1), default=1, help="tensor-parallel ranks (1)")
    parser.add_argument("--pp", type=whole(1), default=1, help="pipeline stages (1)")
    parser.add_argument(
        "--accumulates", action="store_true", help="a step has several microbatches on each rank"
    )

    parser.add_argument("--card", type=float, nargs="+", metavar="GB", help="cards to look at (24 48 80 141)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
