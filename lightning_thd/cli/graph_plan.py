"""``lightning-thd graph-plan``: which CUDA graphs a data set is worth, before any GPU is at hand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from lightning_thd.cli.arguments import positive, whole
from lightning_thd.cuda_graph.choice.costs import GraphCosts, IntArray, lengths_from_quantiles
from lightning_thd.cuda_graph.choice.plan import GraphPlan, needed_sequences, plan_graphs
from lightning_thd.cuda_graph.choice.sampling import longest_sequence, sample_layouts
from lightning_thd.data import THDDataModule
from lightning_thd.packing import PackPlanner

_DESCRIPTION = """Choose the buckets of CUDAGraphCallback: from a data set, or from the quantiles of the
number of sequences in a batch. Costs are relative to one eager step unless given."""


def graph_plan(arguments: Sequence[str]) -> GraphPlan:
    """Return the plan of CUDA graphs for arguments such as ``["corpus.jsonl", "--capacity", "8192"]``."""
    parser = make_parser()
    given = parser.parse_args(list(arguments))
    if (given.data is None) == (given.quantiles is None):
        parser.error("give either a data set or --quantiles P50 P90 P99 MAX")
    defaults = GraphCosts()
    eager = 1.0 if given.eager_ms is None else given.eager_ms
    costs = GraphCosts(
        eager=defaults.eager * eager,
        graph=defaults.graph * eager if given.graph_ms is None else given.graph_ms,
        per_sequence=defaults.per_sequence * eager
        if given.per_sequence_us is None
        else given.per_sequence_us / 1000,
    )
    try:
        if given.quantiles is not None:
            p50, p90, p99, largest = given.quantiles
            needs: IntArray = lengths_from_quantiles({0.5: p50, 0.9: p90, 0.99: p99}, largest)
            slots, max_seqlen = given.capacity, given.capacity
        else:
            needs, slots, max_seqlen = _from_data(
                given.data, given.capacity, text_key=given.text_key, tokenizer=given.tokenizer
            )
    except (ValueError, OSError, ModuleNotFoundError) as err:
        parser.error(str(err))
    return plan_graphs(
        needs, slots=slots, max_seqlen=max_seqlen, costs=costs, given=given.max_sequences or ()
    )


def main(arguments: Sequence[str]) -> None:
    """Print the plan of CUDA graphs for a data set."""
    plan = graph_plan(arguments)
    as_json = make_parser().parse_args(list(arguments)).json
    print(json.dumps(asdict(plan)) if as_json else plan.table())


def _from_data(
    path: str, capacity: int, *, text_key: str, tokenizer: str | None
) -> tuple[IntArray, int, int]:
    data = THDDataModule(
        path, capacity=capacity, oversize="truncate", empty="drop", text_key=text_key, tokenizer=tokenizer
    )
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    planner = getattr(loader, "planner", None)
    assert isinstance(planner, PackPlanner)
    slots, longest = planner.slots.usable, longest_sequence(planner)
    return needed_sequences(sample_layouts(planner), slots, longest), slots, longest


def make_parser() -> argparse.ArgumentParser:
    """Build the command's argument parser."""
    parser = argparse.ArgumentParser(
        "lightning-thd graph-plan",
        description=_DESCRIPTION,
        epilog="example: lightning-thd graph-plan texts.jsonl --capacity 8192",
    )
    parser.add_argument("data", nargs="?", help="what THDDataModule takes: .jsonl, .parquet, text, a folder")
    parser.add_argument("--capacity", type=whole(1), default=8192, help="slots of a pack")
    parser.add_argument("--text-key", default="text", help="the key of the text in a JSONL object")
    parser.add_argument("--tokenizer", help="name or path of a Hugging Face tokenizer; UTF-8 bytes without")
    parser.add_argument("--quantiles", type=int, nargs=4, metavar=("P50", "P90", "P99", "MAX"))
    parser.add_argument(
        "--max-sequences", type=whole(1), nargs="+", metavar="N", help="buckets of your own, to be judged"
    )
    parser.add_argument("--eager-ms", type=positive, help="a measured eager step")
    parser.add_argument("--graph-ms", type=positive, help="a measured replay, less its sequences' share")
    parser.add_argument(
        "--per-sequence-us", type=positive, help="what a sequence of the bucket adds to a replay"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
