"""How far one sequence of a pack moves another's logits: transformers' ways to say where it ends, and ours.

``python -m benchmarks.leaks`` builds a small model of every family from its config, runs two packs that
differ in one token of the first of three sequences, and prints the largest change of the other sequences'
logits, of their largest value. 0 is right. "refuses" is an error, which is right too but trains nothing.
``--trl`` prints the same for the batches that TRL's ``packing=True`` makes, with the installed TRL.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
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


def _of_trl(batch: THDBatch, *, padding_free: bool) -> dict[str, Any]:
    """Return what TRL's SFTTrainer gives the model for a pack: its collator's batch, without a cache."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=padding_free)
    inputs = collate([{"input_ids": batch.input_ids.tolist(), "seq_lengths": list(LENGTHS)}])
    return {name: value for name, value in inputs.items() if name != "labels"} | {"use_cache": False}


# packing_strategy of SFTConfig -> what the model gets. "bfd" is the default and collates without padding.
TRL_STRATEGIES: dict[str, Callable[[THDBatch], dict[str, Any]]] = {
    "bfd": partial(_of_trl, padding_free=True),
    "wrapped": partial(_of_trl, padding_free=False),
}


def measure_trl(name: str) -> dict[str, float | None]:
    """TRL's packing strategies on one family, under the attention that transformers chooses for it."""
    moved = {}
    for strategy, inputs in TRL_STRATEGIES.items():
        try:
            model = build(name, "sdpa").eval()
        except ValueError:  # a family without attention, or without this one
            model = build(name, "eager").eval()
        shake(model)
        moved[strategy] = leak(model, inputs)
    return moved


def cell_of(moved: float | None) -> str:
    """Return a cell of the tables for what a family did."""
    if moved is None:
        return "refuses"
    return "0" if moved == 0 else f"{moved:.0e}"


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", action="store_true", help="what TRL's packing does, with the installed TRL")
    warnings.simplefilter("ignore")
    if parser.parse_args(argv).trl:
        print("| family | " + " | ".join(f"TRL {version('trl')}, {name}" for name in TRL_STRATEGIES) + " |")
        print(f"| --- {'| --- ' * len(TRL_STRATEGIES)}|")
        for name, kind in FAMILIES:
            print(f"| {name} ({kind}) | {' | '.join(map(cell_of, measure_trl(name).values()))} |", flush=True)
        return
    print(f"| family | {' | '.join(WAYS)} |")
    print(f"| --- {'| --- ' * len(WAYS)}|")
    for name, kind in FAMILIES:
        row = measure(name)
        print(f"| {name} ({kind}) | {' | '.join(map(cell_of, row.values()))} |", flush=True)
        found = row["thd"]
        assert found is not None
        less(f"leak, {name}", found, "", 1e-6, precision="fp32")


if __name__ == "__main__":
    main()
