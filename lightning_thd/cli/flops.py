"""``lightning-thd flops`` and ``peaks``: the cost of a step, part by part, and the peaks of devices."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_thd._imports import require
from lightning_thd.cli.arguments import Parser, nearest, refuse_unreachable, whole
from lightning_thd.flops.model import FlopsModel
from lightning_thd.flops.peak_table import PEAKS, Peak
from lightning_thd.flops.peaks import find_peak, peak_flops
from lightning_thd.report.terminal import Table, show_table
from lightning_thd.stats import SeqStats

_PARTS = ("linear", "attention", "logits", "vision", "model", "recompute", "hardware")
_DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8", "fp4")


def breakdown_table(model: FlopsModel, lengths: Sequence[int]) -> Table:
    """Build a table of a training step's FLOPs by part, beside those of one sequence as long as all."""
    packed = model.training_flops(SeqStats.from_lengths(lengths, windows=model.windows))
    as_one = model.training_flops(SeqStats.from_lengths([sum(lengths)], windows=model.windows))
    names = [name for name in _PARTS if getattr(packed, name)]
    rows = [
        (
            name,
            f"{getattr(packed, name):,}",
            f"{getattr(packed, name) / max(packed.model, 1):.1%}",
            f"{getattr(as_one, name):,}",
        )
        for name in names
    ]
    once = as_one.model / packed.model if packed.model else 1.0
    return Table(
        title=f"{model.name}: {len(lengths)} sequences, {sum(lengths):,} tokens, causal={model.causal!r}",
        columns=("", "FLOPs", "share", "as one sequence"),
        rows=rows,
        foot=f"Counted as one sequence: {once:.3f} x the model's FLOPs." if packed.model else "",
    )


def load_config(path: str) -> Any:
    """Load a config from a ``config.json``, a folder that holds one, or a name transformers can resolve."""
    refuse_unreachable(path)
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.exists():
        auto = require("transformers", feature=f"flops {path}, which is no file here,").AutoConfig
        return auto.from_pretrained(path)
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as err:
        raise ValueError(f"{file}, line {err.lineno}: {err.msg}. A config.json is wanted.") from err
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ValueError(f"{file} has no model_type. Pass the config.json of a transformers model.")
    return config


def flops_parser() -> argparse.ArgumentParser:
    """Build the command's argument parser."""
    parser = Parser(
        prog="lightning-thd flops",
        description="FLOPs of training a model on sequences of given lengths.",
        epilog='example: lightning-thd flops config.json --lengths 512 1024 --device "NVIDIA H200"',
    )
    parser.add_argument("config", help="config.json, a folder with one, or a model name")
    parser.add_argument("--lengths", type=whole(0), nargs="+", required=True, help="tokens of every sequence")
    parser.add_argument("--causal", choices=("half", "exact", "full"), default="half")
    parser.add_argument("--recompute", choices=("none", "full", "early_stop", "selective"), default="none")
    parser.add_argument("--embedding", action="store_true", help="count the embedding as a matmul")
    parser.add_argument("--router", action="store_true", help="count the routers of experts")
    parser.add_argument("--device", help="device name: adds the least time these FLOPs take on it")
    parser.add_argument("--dtype", help="bf16 (the default), fp16, tf32, fp32, fp8 or fp4, with --device")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def flops(arguments: Sequence[str]) -> None:
    """Run ``lightning-thd flops CONFIG --lengths 512 1024 2048``."""
    parser = flops_parser()
    given = parser.parse_args(arguments)
    try:
        if given.dtype is not None and given.device is None:
            raise ValueError(f"--dtype {given.dtype} is of the peak of --device. Pass --device too.")
        dtype = given.dtype or "bf16"
        peak = None if given.device is None else peak_flops(given.device, dtype)
        model = FlopsModel.from_config(
            load_config(given.config),
            causal=given.causal,
            embedding=given.embedding,
            router=given.router,
            recompute=given.recompute,
        )
        found = model.training_flops(SeqStats.from_lengths(given.lengths, windows=model.windows))
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as err:
        parser.error(str(err))
    least_ms = found.hardware / peak * 1e3 if peak is not None else None
    if given.json:
        values = {**asdict(found), "model": found.model, "hardware": found.hardware, "least_ms": least_ms}
        sys.stdout.write(json.dumps(values, default=str) + "\n")
        return
    show_table(breakdown_table(model, given.lengths))
    if peak is not None:
        sys.stdout.write(f"At {peak / 1e12:g} TFLOP/s: {least_ms:.3f} ms at the least.\n")
    elif given.device is not None:
        sys.stdout.write(f"No peak is known for {given.device!r} in {dtype}.\n")


def peaks_table(rows: Sequence[Peak]) -> Table:
    """Build a table of dense TFLOP/s by dtype, with numbers of the sources that stand below it."""
    sources = list(dict.fromkeys(row.source for row in rows))
    return Table(
        columns=("device", *_DTYPES, "printed", "source"),
        rows=[
            (
                row.name,
                *("-" if (peak := getattr(row, name)) is None else f"{peak:g}" for name in _DTYPES),
                row.printed,
                f"[{1 + sources.index(row.source)}]",
            )
            for row in rows
        ],
        text=(0, len(_DTYPES) + 1),
        foot="\n".join(f"[{i}] {source}" for i, source in enumerate(sources, 1)),
    )


def peaks_parser() -> argparse.ArgumentParser:
    """Build the command's argument parser."""
    parser = Parser(
        prog="lightning-thd peaks",
        description="Dense peaks that MFU is held against, in TFLOP/s of one device, with their sources.",
        epilog='example: lightning-thd peaks "NVIDIA H200"',
    )
    parser.add_argument("device", nargs="?", help="a device name, as torch.cuda.get_device_name gives it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def nearest_device(given: str) -> str:
    """Return "; did you mean X?" for the known device with the most similar name, or "."."""
    return nearest(given.lower().removeprefix("nvidia ").removeprefix("amd "), [row.name for row in PEAKS])


def peaks(arguments: Sequence[str]) -> None:
    """Run ``lightning-thd peaks [DEVICE] [--json]``."""
    parser = peaks_parser()
    given = parser.parse_args(arguments)
    rows: Sequence[Peak] = PEAKS
    if given.device is not None:
        row = find_peak(given.device)
        if row is None:
            meant = nearest_device(given.device)
            parser.error(
                f"no peak is known for {given.device!r}{meant} Pass THDThroughputMonitor(peak=<dense "
                "FLOP/s>), or peak='measure' to time matmuls; `lightning-thd peaks` lists what is known."
            )
        rows = [row]
    if given.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    else:
        show_table(peaks_table(rows))
