"""Sequences padded one by one (``align=``): the padding is no token, wherever the arguments have been."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from benchmarks.families import build, samples
from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.models import packed, register_thd
from tests.models import support
from tests.models.matrix import relative_error

register_thd()
EIGHTS = Alignment(sequence_multiple=8, total_multiple=16)
MODELS = {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",  # windows to both sides
    "llama": "LlamaForCausalLM",
}
HEADS = {
    "bert": "BertForSequenceClassification",
    "modernbert": "ModernBertForSequenceClassification",
    "llama": "LlamaForSequenceClassification",
}


def padded() -> THDBatch:
    batch = support.pack(align=EIGHTS)
    assert batch.padded_lengths[:4] == (8, 8, 24, 16)
    assert batch.lengths == (7, 1, 21, 9)
    return batch


def moved(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Give what a worker process hands over: other tensors, with nothing remembered about them."""
    made: dict[str, Any] = pickle.loads(pickle.dumps(kwargs))
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in made.items()}


@pytest.mark.parametrize("family", MODELS)
def test_no_token_sees_the_padding_behind_it(family: str) -> None:
    stock, ours = (build(family, MODELS[family], name) for name in ("eager", "thd"))
    batch = padded()
    want = [stock(input_ids=ids[None]).logits[0] for ids in samples()]
    for kwargs in (batch.hf_kwargs(), moved(batch.hf_kwargs())):
        got = batch.unpack(ours(**kwargs).logits)
        assert max(relative_error(a, b) for a, b in zip(got, want, strict=True)) <= 1e-5
    with packed(batch):
        logits = ours(**batch.hf_kwargs()).logits
    torch.testing.assert_close(torch.cat(batch.unpack(logits)), torch.cat(want), rtol=1e-4, atol=1e-5)
    torch.cat(batch.unpack(logits)).sum().backward()
    torch.cat(want).sum().backward()
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        assert b.grad is None or relative_error(a.grad, b.grad, max(1e-2, float(b.grad.abs().max()))) <= 1e-4


@pytest.mark.parametrize("family", HEADS)
def test_no_head_pools_the_padding(family: str) -> None:
    stock, ours = (build(family, HEADS[family], name) for name in ("eager", "thd"))
    for model in (stock, ours):
        model.config.pad_token_id = None  # the last token of a row, whatever it is
        model.config.classifier_pooling = "mean"
    want = torch.cat([stock(input_ids=ids[None]).logits for ids in samples()])
    got = ours(**moved(padded().hf_kwargs())).logits
    assert got.shape == (5, 2)  # the trailing pad is the last
    assert relative_error(got[:4], want) <= 1e-5
