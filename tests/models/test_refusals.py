"""Layers, labels and arguments with which a pack would silently be wrong are refused by name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("transformers")

import transformers
from transformers.modeling_outputs import SequenceClassifierOutput

from benchmarks.families import build as tiny
from benchmarks.families import samples
from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.models import register_thd
from lightning_thd.models.families.pooled_heads import refuse_pooled_pack
from lightning_thd.models.refusals import refuse_early_release, refuse_unknown_layers
from lightning_thd.parallel import shard_batch
from tests.models import matrix
from tests.models.families import build
from tests.models.support import loss_alone, pack
from tests.tiny import tiny_llama

register_thd()


# ---- Layers


def test_an_unknown_layer_with_a_state_is_refused_by_name() -> None:
    model = build("llama", "thd")
    batch, _ = matrix.packs()
    layer: Any = model.get_submodule("model.layers.1")
    layer.memory = nn.Sequential(nn.Conv1d(32, 32, 4, groups=32))
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.memory \(Sequential\) mixes tokens .*check_packing"
    ):
        model(**batch.hf_kwargs())


def test_a_tower_with_a_config_of_its_own_is_none_of_its_business() -> None:
    model: Any = build("llama", "thd")
    tower = build("gpt2", "thd")
    tower.convolution = nn.Sequential(nn.Conv1d(4, 4, 3))
    model.model.tower = tower
    refuse_unknown_layers(model)
    model.model.convolution = nn.Sequential(nn.Conv1d(4, 4, 3))
    with pytest.raises(ValueError, match=r"model\.convolution \(Sequential\)"):
        refuse_unknown_layers(model)
    model.model = nn.Identity()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no layer that knows about packs"):
        refuse_unknown_layers(model)


OWN_ATTENTION = [("bloom", "BloomForCausalLM"), ("xlnet", "XLNetLMHeadModel"), ("mpt", "MptForCausalLM")]


@pytest.mark.parametrize(("family", "name"), OWN_ATTENTION)
def test_a_model_whose_attention_cannot_be_chosen_refuses_thd(family: str, name: str) -> None:
    message = f"{name} has its own attention that ignores attn_implementation"
    with pytest.raises(ValueError, match=message):
        tiny(family, name, "thd")
    model = tiny(family, name, "eager")
    for switched in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match=message):
            switched.set_attn_implementation("thd")
        with pytest.raises(ValueError, match=message):
            switched.set_attn_implementation({"": "thd"})
        switched.set_attn_implementation("eager")
        assert switched.config._attn_implementation == "eager"


def test_a_model_whose_attention_cannot_be_chosen_runs_and_pickles_as_its_own_class() -> None:
    model = tiny("bloom", "BloomForCausalLM", "eager")
    assert type(model).__name__ == "BloomForCausalLM"
    assert type(model).forward is transformers.BloomForCausalLM.forward
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin) is transformers.BloomForCausalLM
    ids = samples()[0][None]
    assert torch.equal(twin(ids).logits, model(ids).logits)


def test_families_that_an_early_release_computes_otherwise() -> None:
    with pytest.raises(
        ValueError, match=r"transformers 5.17.0, moshi differs between a pack .*; it is exact from 5.18"
    ):
        refuse_early_release("moshi", "5.17.0")
    refuse_early_release("moshi", "5.18.0")
    refuse_early_release("llama", "5.17.0")


# ---- Labels

CAUSAL = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "bert": "BertLMHeadModel"}


@pytest.mark.parametrize("family", CAUSAL)
def test_no_sequence_predicts_the_next_ones_first_token(family: str) -> None:
    stock, ours = (tiny(family, CAUSAL[family], name) for name in ("eager", "thd"))
    batch = pack()
    got = ours(**batch.hf_kwargs(), labels=batch.input_ids[None]).loss
    torch.testing.assert_close(got, loss_alone(stock), rtol=1e-5, atol=0)


def test_labels_that_are_shifted_already_are_refused_and_not_shifted_twice() -> None:
    model = tiny("llama", CAUSAL["llama"], "thd")
    batch = pack()
    message = (
        "LlamaForCausalLM got labels with a pack: the labels are the next tokens already, as batch.targets"
    )

    with pytest.raises(ValueError, match=message):
        model(**batch.hf_kwargs(), labels=batch.targets[None])
    with pytest.raises(ValueError, match="Pass shift_labels=labels too"):
        model(**pack(pad_to=60).hf_kwargs(), labels=pack(pad_to=60).targets[None])

    shifted = model(**batch.hf_kwargs(), labels=batch.targets[None], shift_labels=batch.targets[None]).loss
    assert torch.equal(shifted, model(**batch.hf_kwargs(), labels=batch.input_ids[None]).loss)

    masked = batch.input_ids.masked_fill(torch.arange(batch.input_ids.numel()) % 3 > 0, -100)
    assert model(**batch.hf_kwargs(), labels=masked[None]).loss.isfinite()

    same = THDBatch.collate([{"input_ids": [9] * 30}])  # its own and the next token are one
    assert model(**same.hf_kwargs(), labels=same.targets[None]).loss.isfinite()


def test_labels_of_single_tokens_stay_where_they_are() -> None:
    stock, ours = (tiny("bert", "BertForTokenClassification", name) for name in ("eager", "thd"))
    batch = pack()
    labels = batch.input_ids[None] % 2
    got = ours(**batch.hf_kwargs(), labels=labels).loss
    losses = [stock(input_ids=ids[None], labels=ids[None] % 2).loss * len(ids) for ids in samples()]
    torch.testing.assert_close(got, sum(losses, torch.zeros(())) / labels.numel(), rtol=1e-5, atol=0)


def test_a_loss_over_a_whole_row_is_refused() -> None:
    batch = pack()
    model = tiny("bert", "BertForQuestionAnswering", "thd")
    with pytest.raises(ValueError, match=r"BertForQuestionAnswering got a pack and start_positions"):
        model(**batch.hf_kwargs(), start_positions=torch.tensor([1]), end_positions=torch.tensor([2]))
    model = tiny("bert", "BertForPreTraining", "thd")
    with pytest.raises(ValueError, match=r"BertForPreTraining got a pack and labels.*not known to stay"):
        model(**batch.hf_kwargs(), labels=batch.input_ids[None])


# ---- Shards, offsets and outputs


@pytest.mark.parametrize(
    ("family", "name", "labels", "message"),
    [
        ("llama", "LlamaForCausalLM", True, "got labels and one rank's shard of a pack"),
        ("llama", "LlamaForSequenceClassification", False, "computes one row per sequence, which needs"),
        ("bert", "BertForMaskedLM", False, "lets tokens see later tokens, and context parallelism pads"),
    ],
)
def test_what_needs_whole_sequences_refuses_a_shard(
    family: str, name: str, labels: bool, message: str
) -> None:
    part = shard_batch(pack(align=Alignment.for_(cp=2)), group=None, cp=2, rank=0)
    extra = {"labels": part.input_ids[None]} if labels else {}
    with pytest.raises(ValueError, match=message):
        tiny(family, name, "thd")(**part.hf_kwargs(), **extra)


@pytest.mark.parametrize("offsets", [[0, 3, 5], [0, 3, 60], [0, 30, 20, 38], [5, 43]])
def test_offsets_that_do_not_end_with_the_pack(offsets: list[int]) -> None:
    model = tiny("llama", "LlamaForSequenceClassification", "thd")
    kwargs = pack().hf_kwargs()
    kwargs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(offsets, dtype=torch.int32))
    with pytest.raises(
        ValueError, match=r"cu_seq_lens_q runs from \[\d\] to \[\d+\], but must run from 0 to 38, the slots"
    ):
        model(**kwargs)


class Scores(transformers.LlamaPreTrainedModel):  # type: ignore[misc]
    a_token = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.post_init()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **kwargs).last_hidden_state
        return SequenceClassifierOutput(logits=hidden[..., 0] if self.a_token else hidden[:, -1, :2])


def test_one_score_for_all_sequences_is_refused_and_one_a_token_is_not() -> None:
    config = tiny("llama", "LlamaForCausalLM", "eager").config
    model = Scores._from_config(copy.deepcopy(config), attn_implementation="thd").eval()
    with pytest.raises(
        ValueError, match="Scores returns one row of logits for a pack of 4 sequences. Feed it"
    ):
        model(**pack().hf_kwargs())
    for pooled in (torch.ones(1, 3), (torch.ones(1, 3),), {"text_embeds": torch.ones(1, 38)}):
        with pytest.raises(ValueError, match="Scores returns one row of (output 0|text_embeds), "):
            refuse_pooled_pack(model, pack().boundaries, pooled)
    model.a_token = True
    logits = model(**pack().hf_kwargs()).logits
    model.set_attn_implementation("eager")
    alone = torch.cat([model(input_ids=ids[None]).logits for ids in samples()], 1)
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)


def test_an_ignored_label_of_another_number_stays_ignored() -> None:
    model = tiny_llama()
    ids = torch.arange(3, 15)
    batch = THDBatch.collate([{"input_ids": ids[:7]}, {"input_ids": ids[7:]}])
    labels = torch.where(ids % 3 == 0, 9, ids)
    got = model(**batch.hf_kwargs(), labels=labels[None], ignore_index=9).loss
    targets = torch.tensor([*labels[1:7], 9, *labels[8:], 9])
    expected = F.cross_entropy(model(**batch.hf_kwargs()).logits[0].float(), targets, ignore_index=9)
    torch.testing.assert_close(got, expected)


def test_a_batch_in_place_of_ids_says_what_to_write() -> None:
    model = tiny_llama()
    for called in (model, model.model):
        with pytest.raises(TypeError, match=r"got a THDBatch in place of tensors. Write model\(\*\*batch.hf"):
            called(pack())
