"""Positions of the RoBERTa and BART kinds: counted from every sequence's start, as in a row of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.families import build, compare
from lightning_thd.batch import THDBatch
from lightning_thd.models import register_thd
from lightning_thd.models.pack import Pack
from lightning_thd.models.positions import padded_positions

register_thd()
FAMILIES = {
    "roberta": "RobertaForCausalLM",
    "xlm-roberta": "XLMRobertaForCausalLM",
    "camembert": "CamembertForCausalLM",
    "data2vec-text": "Data2VecTextForCausalLM",
    "bart": "BartForCausalLM",
    "marian": "MarianForCausalLM",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone(family: str) -> None:
    assert compare("causal", family, FAMILIES[family])[0] == "exact"


@pytest.mark.parametrize("family", ["roberta", "bart"])
def test_padding_tokens_inside_a_sequence_count_as_in_a_row(family: str) -> None:
    stock, ours = (build(family, FAMILIES[family], name) for name in ("eager", "thd"))
    documents = [torch.tensor([9, 0, 11, 12]), torch.tensor([0, 9]), torch.tensor([8])]
    batch = THDBatch.collate([{"input_ids": ids} for ids in documents])
    with torch.no_grad():
        got = batch.unpack(ours(**batch.hf_kwargs()).logits)
        for ids, logits in zip(documents, got, strict=True):
            want = stock(input_ids=ids[None], use_cache=False).logits[0]
            torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-5)


def test_outside_a_pack_nothing_changes() -> None:
    stock, ours = (build("roberta", FAMILIES["roberta"], name) for name in ("eager", "thd"))
    ids = torch.randint(8, 100, (2, 7), generator=torch.Generator().manual_seed(0))
    for arguments in ({}, {"position_ids": torch.arange(3, 10).expand(2, 7)}):
        with torch.no_grad():
            a, b = (model(input_ids=ids, use_cache=False, **arguments).logits for model in (stock, ours))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def positions(ids: list[int] | None, lengths: tuple[int, ...], slots: int) -> Any:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    pack = Pack(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_length_q=4, max_length_k=4, slots=slots)
    given = None if ids is None else torch.tensor([ids])
    return padded_positions(given, None, 1, pack).tolist()


def test_the_documented_value_empty_sequences_and_embeddings() -> None:
    assert positions([5, 6, 7, 1, 8], (2, 3), 5) == [[2, 3, 2, 1, 3]]
    assert positions([5, 6, 7], (2, 0, 1, 0), 3) == [[2, 3, 2]]
    assert positions(None, (2, 3), 5) == [[2, 3, 2, 3, 4]]


@pytest.mark.slow
def test_compiled_before_the_first_call_it_is_the_same() -> None:
    torch._dynamo.reset()
    model = build("bart", FAMILIES["bart"], "thd")
    batch = THDBatch.collate([{"input_ids": [9, 10, 11]}, {"input_ids": [12, 13]}])
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch.hf_kwargs()).logits, model(**batch.hf_kwargs()).logits)
