"""How far one sequence of a pack moves another's logits: transformers' ways to say where it ends, and ours.

``python -m benchmarks.leaks`` builds a small model of every family from its config, runs two packs that
differ in one token of the first of three sequences, and prints the largest change of the other sequences'
logits, of their largest value. 0 is right. "refuses" is an error, which is right too but trains nothing.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.results import less
from lightning_thd import THDBatch
from tests.models.families import VOCAB, build
from tests.models.matrix import shake

FAMILIES = (
    ("llama", "dense"),
    ("qwen3", "dense"),
    ("gemma3", "window"),
    ("mixtral", "experts"),
    ("gpt2", "dense"),
    ("stablelm", "no arguments passed down"),
    ("qwen3_next", "linear attention"),
    ("mamba2", "state space"),
    ("bamba", "hybrid"),
    ("granitemoehybrid", "hybrid"),
    ("falcon_h1", "hybrid"),
    ("nemotron_h", "hybrid"),
    ("zamba2", "hybrid"),
    ("jamba", "hybrid"),
)
LENGTHS = (9, 16, 7)


def _offsets(batch: THDBatch) -> dict[str, Any]:
    return {
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
    }


def _stock(batch: THDBatch, **kwargs: Any) -> dict[str, Any]:
    return {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None], **kwargs}


WAYS: dict[str, tuple[str, Callable[[THDBatch], dict[str, Any]]]] = {
    "position_ids": ("eager", _stock),
    "+ use_cache=False": ("eager", lambda batch: _stock(batch, use_cache=False)),
    "+ mask of ones": (
        "eager",
        lambda batch: _stock(batch, use_cache=False, attention_mask=torch.ones_like(batch.input_ids[None])),
    ),
    "+ cu_seq_lens": ("eager", lambda batch: _stock(batch, use_cache=False, **_offsets(batch))),
    "thd": ("thd", lambda batch: batch.hf_kwargs()),
}


def packs() -> tuple[THDBatch, THDBatch]:
    """Two packs that differ in one token of the first sequence."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCAB, (n,), generator=generator) for n in LENGTHS]
    changed = [rows[0].clone(), *rows[1:]]
    changed[0][4] = (changed[0][4] - 3 + 1) % (VOCAB - 3) + 3
    both = [THDBatch.collate([{"input_ids": ids} for ids in x]) for x in (rows, changed)]
    return both[0], both[1]


def leak(model: nn.Module, inputs: Callable[[THDBatch], dict[str, Any]]) -> float | None:
    """Largest change of the other sequences' logits, of their largest value; None where the model refuses."""

    def logits(batch: THDBatch) -> Tensor:
        out: Tensor = model(**inputs(batch)).logits.reshape(sum(LENGTHS), -1)
        return out

    first, second = packs()
    try:
        with torch.no_grad():
            a, b = logits(first), logits(second)
    except (ValueError, RuntimeError, TypeError, NotImplementedError):
        return None
    assert not torch.equal(a[: LENGTHS[0]], b[: LENGTHS[0]]), "the changed sequence has to move"
    a, b = a[LENGTHS[0] :], b[LENGTHS[0] :]
    return float((a - b).abs().max() / a.abs().max())


def measure(name: str) -> dict[str, float | None]:
    """Every way on one family."""
    found = {}
    for way, (attention, inputs) in WAYS.items():
        model = build(name, attention).eval()
        shake(model)
        found[way] = leak(model, inputs)
    return found


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    warnings.simplefilter("ignore")
    print(f"| family | {' | '.join(WAYS)} |")
    print(f"| --- {'| --- ' * len(WAYS)}|")
    for name, kind in FAMILIES:
        row = measure(name)
        cells = ["refuses" if x is None else "0" if x == 0 else f"{x:.0e}" for x in row.values()]
        print(f"| {name} ({kind}) | {' | '.join(cells)} |", flush=True)
        found = row["thd"]
        assert found is not None
        less(f"leak, {name}", found, "", 1e-6, precision="fp32")


if __name__ == "__main__":
    main()
