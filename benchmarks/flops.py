"""Our FLOPs of one forward pass beside torch's counter, for every family: ``python -m benchmarks.flops``.

Small models are built on the meta device and run on one row of 32 tokens. torch counts every matmul that
transformers runs: whole squares where attention is causal or windowed (ours are counted so here too), every
expert where a family runs them all, and no scan or convolution of a state space. About two minutes.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from dataclasses import replace
from typing import Any

from benchmarks.results import keep
from lightning_thd.flops import Blocks, FlopsModel, SeqStats
from lightning_thd.flops.terms import Layer, Term
from tests.flops.families import ENCODERS, FAMILIES, counted, encoder, meta_model, small_config

TOTAL = 32
_SCANS = ("scan", "conv", "delta")  # elementwise kernels, or einsums of their own
_LINEAR = ("mm", "addmm")
# torch counts these as batched products: experts, streams with streams, groups of heads
_BATCHED = ("experts_up", "experts_down", "altup_mix", "stream_mix", "out_groups")


def whole_squares(model: FlopsModel) -> FlopsModel:
    """Count what torch counts: no windows, no causal half, no scans."""
    layers = [
        Layer(path=layer.path, terms=tuple(_plain(term) for term in layer.terms if term.name not in _SCANS))
        for layer in model.layers
    ]
    return replace(model, layers=tuple(layers), causal="full", router=True)


def _plain(term: Term) -> Term:
    whole = term.basis == "pair" and not isinstance(
        term.window, Blocks
    )  # blocks: exact pairs, of a rectangle
    return replace(term, window=None) if whole else term


def row(family: str) -> tuple[int, int, int, int]:
    """Matmuls with weights, ours and torch's; products of attention and experts, ours and torch's."""
    config, module = _model(family)
    by_op = counted(module, TOTAL)
    model = whole_squares(FlopsModel.from_config(config))
    batched = sum(
        term.forward * TOTAL for layer in model.layers for term in layer.terms if term.name in _BATCHED
    )
    flops = model.forward_flops(SeqStats.from_lengths([TOTAL], windows=model.windows))
    linear = flops.linear + flops.logits - batched
    products = sum(count for name, count in by_op.items() if name not in _LINEAR)
    return linear, by_op["mm"] + by_op["addmm"], flops.attention + batched, products


def _model(family: str) -> tuple[Any, Any]:
    if family in ENCODERS:
        return encoder(family)
    config = small_config(family)
    return config, meta_model(config)


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="*", help="all by default")
    given = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    names = given.families or [*FAMILIES, *ENCODERS]
    columns = f"{'torch':>13}{'ratio':>8}"
    print(f"{'family':<22}{'weights: ours':>15}{columns}{'products: ours':>17}{columns}")
    equal = 0
    for name in names:
        ours, theirs, products, others = row(name)
        equal += ours == theirs
        ratios = (f"{a / b:.4f}" if b else "-" for a, b in ((ours, theirs), (products, others)))
        first, second = ratios
        print(f"{name:<22}{ours:>15,}{theirs:>13,}{first:>8}{products:>17,}{others:>13,}{second:>8}")
    print(f"{equal} of {len(names)} families equal torch's count of matmuls with weights, routers included")
    if not given.families:
        keep("families in the table of FLOPs", len(names), "", at_least=80)
        keep("of them equal to torch's counter", equal, "", at_least=len(names) - 3)


if __name__ == "__main__":
    main()
