"""Classifiers and reward models on packs: one row a sequence, its own."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from benchmarks.families import build, samples
from lightning_thd.models import register_thd
from tests.models.matrix import relative_error
from tests.models.support import pack

register_thd()
HEADS = {
    "llama": "LlamaForSequenceClassification",  # last token that is no padding
    "gpt2": "GPT2ForSequenceClassification",
    "bert": "BertForSequenceClassification",  # first token, through a pooler
    "roberta": "RobertaForSequenceClassification",  # first token
    "modernbert": "ModernBertForSequenceClassification",
}


class Whole(nn.Module):
    """Pools by the mean over the row."""

    def __init__(self, pooler: nn.Module) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, hidden: Tensor) -> Any:
        return self.pooler(hidden.mean(1, keepdim=True))


def both(family: str, head: str, **changes: Any) -> tuple[Any, Any]:
    made = [build(family, head, name) for name in ("eager", "thd")]
    for model in made:
        for name, value in changes.items():
            setattr(model.config, name, value)
    return made[0], made[1]


def alone(stock: Any) -> Tensor:
    return torch.cat([stock(input_ids=ids[None]).logits for ids in samples()])


@pytest.mark.parametrize("family", HEADS)
def test_rows_loss_and_gradients_are_those_of_the_sequences_alone(family: str) -> None:
    stock, ours = both(family, HEADS[family])
    batch = pack()
    labels = torch.tensor([0, 1, 1, 0])
    got = ours(**batch.hf_kwargs(), labels=labels)
    want = alone(stock)

    assert got.logits.shape == (4, 2)
    assert relative_error(got.logits, want) <= 1e-5

    for return_dict in (False, True):
        items = ours(**batch.hf_kwargs(), labels=labels, return_dict=return_dict)
        assert torch.equal(items[0], got.loss)
        assert torch.equal(items[1], got.logits)

    loss = torch.nn.functional.cross_entropy(want, labels)
    torch.testing.assert_close(got.loss, loss, rtol=1e-5, atol=1e-6)

    got.loss.backward()
    loss.backward()
    largest = max(float(p.grad.abs().max()) for p in stock.parameters() if p.grad is not None)

    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert b.grad is None or relative_error(a.grad, b.grad, 1e-2 * largest) <= 1e-4


def test_pooled_outputs_and_a_last_token_without_padding() -> None:
    stock, ours = both("llama", HEADS["llama"], pad_token_id=None)
    assert relative_error(ours(**pack().hf_kwargs()).logits, alone(stock)) <= 1e-5
    assert ours.config.pad_token_id is None
    stock, ours = both("bert", "BertModel")
    want = torch.cat([stock(input_ids=ids[None]).pooler_output for ids in samples()])
    assert relative_error(ours(**pack().hf_kwargs()).pooler_output, want) <= 1e-5


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("bert", "BertForMultipleChoice", "got a pack. It compares several sequences"),
        (
            "bart",
            "BartForConditionalGeneration",
            "got a pack. An encoder-decoder has two sequences per sample",
        ),
    ],
)
def test_samples_of_several_sequences_are_refused(family: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{name} {message}"):
        build(family, name, "thd")(**pack().hf_kwargs())


def test_a_trailing_pad_is_the_last_row_and_needs_no_label() -> None:
    stock, ours = both("llama", HEADS["llama"])
    out = ours(**pack(pad_to=48).hf_kwargs(), labels=torch.tensor([0, 1, 1, 0]))
    assert out.logits.shape == (5, 2)
    assert relative_error(out.logits[:4], alone(stock)) <= 1e-5
    with pytest.raises(ValueError, match=r"got 6 labels for a pack of 5 sequences"):
        ours(**pack(pad_to=48).hf_kwargs(), labels=torch.zeros(6, dtype=torch.int64))


def test_logits_that_are_one_row_for_all_are_refused() -> None:
    model = build("bert", "BertForNextSentencePrediction", "thd")
    assert model(**pack().hf_kwargs()).logits.shape == (4, 2)  # pooled a row each
    model.bert.pooler = Whole(model.bert.pooler)
    with pytest.raises(ValueError, match=r"BertModel makes its pooler_output by code.*its pooler is a Whole"):
        model(**pack().hf_kwargs())


def test_forward_of_an_unpickled_classifier_knows_the_pack() -> None:
    model: Any = build("llama", HEADS["llama"], "thd").eval()
    batch = pack()
    want = model(**batch.hf_kwargs()).logits
    assert torch.equal(pickle.loads(pickle.dumps(model)).forward(**batch.hf_kwargs()).logits, want)
