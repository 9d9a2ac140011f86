"""Messages about packs that a model cannot take, which no other test of the room meets."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput

from benchmarks.families import build, samples
from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.models import register, register_thd
from lightning_thd.parallel import THDShard, shard_batch

register_thd()


def pack(align: Alignment | None = None) -> THDBatch:
    return THDBatch.collate([{"input_ids": ids} for ids in samples()], align=align)


def shard() -> THDShard:
    return shard_batch(pack(Alignment.for_(cp=2)), group=None, cp=2, rank=0)


def test_labels_of_a_shard() -> None:
    part, model = shard(), build("llama", "LlamaForCausalLM", "thd")
    with pytest.raises(
        ValueError, match="got labels and one rank's shard of a pack, whose last token's target"
    ):
        model(**part.hf_kwargs(), labels=part.input_ids[None])


def test_positions_counted_along_the_row_of_a_shard() -> None:
    part, model = shard(), build("bart", "BartForCausalLM", "thd")
    with pytest.raises(
        ValueError, match="counts positions along the row and cannot be told those of a shard"
    ):
        model(**part.hf_kwargs())


def test_one_row_of_half_a_sequence() -> None:
    part, model = shard(), build("llama", "LlamaForSequenceClassification", "thd")
    with pytest.raises(
        ValueError, match="makes one row of every sequence, which needs whole sequences of known"
    ):
        model(**part.hf_kwargs())


@pytest.mark.parametrize("offsets", [[0, 3, 5], [0, 3, 60], [0, 30, 20, 38], [5, 43]])
def test_offsets_that_do_not_end_with_the_pack(offsets: list[int]) -> None:
    model, given = build("llama", "LlamaForSequenceClassification", "thd"), pack().hf_kwargs()
    given |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(offsets, dtype=torch.int32))
    with pytest.raises(
        ValueError, match=r"cu_seq_lens_q runs from \[\d\] to \[\d+\], but must run from 0 to 38, the slots"
    ):
        model(**given)


class Scores(transformers.LlamaPreTrainedModel):  # type: ignore[misc]
    """A user's own head: one score a row of tokens, or one a token."""

    a_token = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.post_init()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **kwargs).last_hidden_state
        return SequenceClassifierOutput(logits=hidden[..., 0] if self.a_token else hidden[:, -1, :2])


def test_one_score_for_all_sequences_is_refused_and_one_a_token_is_not() -> None:
    config = build("llama", "LlamaForCausalLM", "eager").config
    model = Scores._from_config(copy.deepcopy(config), attn_implementation="thd").eval()
    with pytest.raises(
        ValueError, match="Scores returns one row of logits for a pack of 4 sequences. Feed it"
    ):
        model(**pack().hf_kwargs())
    model.a_token = True
    logits = model(**pack().hf_kwargs()).logits
    model.set_attn_implementation("eager")
    alone = torch.cat([model(input_ids=ids[None]).logits for ids in samples()], 1)
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)


def test_checkpointing_that_changed_underneath_refuses_thd_alone() -> None:
    class Base:
        def _set_gradient_checkpointing(self, enable: bool) -> None: ...

    table: dict[str, Any] = {}
    interface = SimpleNamespace(register=table.__setitem__)
    register._register_attention(SimpleNamespace(AttentionInterface=interface, PreTrainedModel=Base))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"underneath \(_set_gradient_checkpointing takes no gradient_check"):
        table["thd"]()
