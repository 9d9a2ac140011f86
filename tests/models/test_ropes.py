"""Ropes that look at the longest position of a call: each sequence of a pack is turned as if alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from benchmarks.tiny_configs import tiny
from lightning_thd import _static
from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.models import packed, register_thd

register_thd()
ORIGINAL = 12
LENGTHS = (7, 20, 3, 12, 15)  # shorter than, equal to and longer than the original length; two long ones
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 longrope": ("Phi3", {"rope_parameters": LONGROPE, "max_position_embeddings": 48}),
    "llama dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
    # one complex number in the place of cosine and sine
    "llama4 dynamic": ("Llama4Text", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
}


def build(name: str, attention: str) -> Any:
    family, arguments = ROPES[name]
    config = tiny(getattr(transformers, f"{family}Config"), dict(arguments))
    if name == "phi3 longrope":
        config.original_max_position_embeddings = ORIGINAL
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def documents(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(8, 100, (n,), generator=generator) for n in lengths]


def alone(name: str, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():  # a fresh model each: a dynamic rope remembers the longest sequence it has met
        return build(name, "eager")(input_ids=ids[None], use_cache=False).logits[0]


def assert_each_as_alone(name: str, run: Any, *cuts: tuple[int, ...]) -> None:
    for lengths in cuts:
        rows = documents(lengths)
        batch = THDBatch.collate([{"input_ids": ids} for ids in rows])
        with torch.no_grad():
            got = batch.unpack(run(**batch.hf_kwargs()).logits)
        for ids, logits in zip(rows, got, strict=True):
            torch.testing.assert_close(logits, alone(name, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ROPES)
def test_packed_equals_alone(name: str) -> None:
    # Short ones again after long ones.
    assert_each_as_alone(name, build(name, "thd"), LENGTHS, LENGTHS[::-1], (3, 5))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("name", ROPES)
def test_padding_inside_a_sequence_does_not_make_it_longer(name: str, told: bool, compiled: bool) -> None:
    # 9 and 11 are padded beyond the original 12, 13 and 20 are beyond it already, and 16 needs no padding.
    rows = documents((9, 20, 3, 11, 13, 16))
    batch = THDBatch.collate(
        [{"input_ids": ids} for ids in rows], align=Alignment(sequence_multiple=16, total_multiple=16)
    )
    assert batch.padded_lengths[:6] == (16, 32, 16, 16, 16, 16)
    torch._dynamo.reset()
    model = build(name, "thd")
    run = torch.compile(model, backend="eager") if compiled else model
    with torch.no_grad(), packed(batch) if told else nullcontext():
        kwargs = batch.hf_kwargs()
        got = batch.unpack(run(**kwargs).logits)
    for ids, logits in zip(rows, got, strict=True):
        torch.testing.assert_close(logits, alone(name, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROPES)
def test_compiled_packed_equals_alone(name: str) -> None:
    torch._dynamo.reset()
    assert_each_as_alone(
        name, torch.compile(build(name, "thd"), backend="eager"), LENGTHS, LENGTHS[::-1], (3, 5)
    )


@pytest.mark.parametrize("name", ROPES)
def test_a_recorded_step_takes_short_sequences_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name, "thd")
    monkeypatch.setattr("lightning_thd.models.positions.shapes_are_static", lambda: True)
    short, long = (THDBatch.collate([{"input_ids": ids} for ids in documents(x)]) for x in ((3, 12), (3, 13)))
    model(**short.hf_kwargs())
    with pytest.raises(ValueError, match=r"longer than 12 tokens.*in a recorded step.*at most 12 tokens"):
        model(**long.hf_kwargs())
    assert not _static.shapes_are_static()
