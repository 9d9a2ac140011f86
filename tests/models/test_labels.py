"""Labels handed to a model together with a pack: the loss of its sequences, one at a time."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.families import build, samples
from lightning_thd.batch import THDBatch
from lightning_thd.models import register_thd

register_thd()
CAUSAL = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "bert": "BertLMHeadModel"}


def pack(**arguments: int) -> THDBatch:
    return THDBatch.collate([{"input_ids": ids} for ids in samples()], **arguments)


@pytest.mark.parametrize("family", CAUSAL)
def test_no_sequence_predicts_the_next_ones_first_token(family: str) -> None:
    stock, ours = (build(family, CAUSAL[family], name) for name in ("eager", "thd"))
    batch = pack()
    got = ours(**batch.hf_kwargs(), labels=batch.input_ids[None]).loss
    total, tokens = torch.zeros(()), 0
    for ids in samples():
        if len(ids) > 1:
            total = total + stock(input_ids=ids[None], labels=ids[None]).loss * (len(ids) - 1)
            tokens += len(ids) - 1
    torch.testing.assert_close(got, total / tokens, rtol=1e-5, atol=0)


def test_shifted_labels_are_taken_as_they_are() -> None:
    model, batch = build("llama", CAUSAL["llama"], "thd"), pack()
    targets = batch.targets[None]
    ours = model(**batch.hf_kwargs(), labels=batch.input_ids[None]).loss
    assert torch.equal(model(**batch.hf_kwargs(), labels=targets, shift_labels=targets).loss, ours)


def test_labels_that_are_shifted_already_are_refused_and_not_shifted_twice() -> None:
    model, batch = build("llama", CAUSAL["llama"], "thd"), pack()
    message = (
        "LlamaForCausalLM got labels with a pack: the labels are the next tokens already, as batch.targets"
    )
    with pytest.raises(ValueError, match=message):
        model(**batch.hf_kwargs(), labels=batch.targets[None])
    with pytest.raises(ValueError, match="Pass shift_labels=labels beside them"):
        model(**pack(pad_to=60).hf_kwargs(), labels=pack(pad_to=60).targets[None])
    masked = batch.input_ids.masked_fill(torch.arange(batch.input_ids.numel()) % 3 > 0, -100)
    assert model(**batch.hf_kwargs(), labels=masked[None]).loss.isfinite()
    same = THDBatch.collate([{"input_ids": [9] * 30}])  # its own and the next token are one
    assert model(**same.hf_kwargs(), labels=same.targets[None]).loss.isfinite()


def test_labels_of_single_tokens_stay_where_they_are() -> None:
    stock, ours = (build("bert", "BertForTokenClassification", name) for name in ("eager", "thd"))
    batch = pack()
    labels = batch.input_ids[None] % 2
    got = ours(**batch.hf_kwargs(), labels=labels).loss
    losses = [stock(input_ids=ids[None], labels=ids[None] % 2).loss * len(ids) for ids in samples()]
    torch.testing.assert_close(got, sum(losses, torch.zeros(())) / labels.numel(), rtol=1e-5, atol=0)


def test_a_loss_over_a_whole_row_is_refused() -> None:
    batch = pack()
    model = build("bert", "BertForQuestionAnswering", "thd")
    with pytest.raises(ValueError, match=r"BertForQuestionAnswering got a pack and start_positions"):
        model(**batch.hf_kwargs(), start_positions=torch.tensor([1]), end_positions=torch.tensor([2]))
    model = build("bert", "BertForPreTraining", "thd")
    with pytest.raises(ValueError, match=r"BertForPreTraining got a pack and labels.*not known to stay"):
        model(**batch.hf_kwargs(), labels=batch.input_ids[None])
