"""Positions restart in every sequence: in position_ids, tables and ropes; a pad's embedding may be zero."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from benchmarks.families import build, compare, samples
from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.models import packed, prepare, register_thd
from lightning_thd.models.families import llama4, roberta, ropes
from lightning_thd.models.pack import pack_from_positions
from lightning_thd.parallel.context.layout import ShardBoundaries
from lightning_thd.parallel.shard import shard_batch
from tests.models.support import ROPES, alone, build_rope, documents

register_thd()
LENGTHS = (7, 20, 3, 12, 15)  # shorter than, equal to and longer than the ropes' original length


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_every_restart_is_a_boundary(lengths: list[int]) -> None:
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    pack = pack_from_positions(positions)
    if len(lengths) == 1:
        assert pack is None
        return
    assert pack is not None
    assert pack.lengths == tuple(lengths)
    assert pack.offsets.tolist() == torch.tensor([0, *lengths]).cumsum(0).tolist()
    assert (pack.max_seqlen, pack.slots) == (max(lengths), sum(lengths))
    assert pack.seq_idx.tolist() == [[i for i, n in enumerate(lengths) for _ in range(n)]]


def test_plain_rows_are_no_pack() -> None:
    assert pack_from_positions(None) is None
    assert pack_from_positions(torch.arange(5).expand(3, -1)) is None
    assert pack_from_positions(torch.tensor([[4]])) is None
    assert pack_from_positions(torch.arange(5)) is None
    image = torch.tensor([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])[:, None]  # M-RoPE
    compiled: Any = torch.compile(pack_from_positions, fullgraph=True, backend="eager")
    assert pack_from_positions(image) is compiled(image) is None


def test_packs_that_cannot_be_read_off_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 4\) restart inside a row"):
        pack_from_positions(torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]))
    with pytest.raises(ValueError, match=r"M-RoPE position_ids of shape \(3, 1, 4\) go back"):
        pack_from_positions(torch.tensor([0, 1, 0, 1]).expand(3, 1, -1))


# ---- Tables

FAMILIES = {
    "roberta": "RobertaForCausalLM",
    "xlm-roberta": "XLMRobertaForCausalLM",
    "camembert": "CamembertForCausalLM",
    "data2vec-text": "Data2VecTextForCausalLM",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_position_tables_count_each_sequence_as_if_alone(family: str) -> None:
    assert compare("causal", family, FAMILIES[family])[0] == "exact"


@pytest.mark.parametrize("shared", [False, True])
def test_padding_tokens_inside_a_sequence_count_as_in_a_row(shared: bool) -> None:
    stock, ours = (build("roberta", FAMILIES["roberta"], name) for name in ("eager", "thd"))
    documents = [torch.tensor([9, 0, 11, 12]), torch.tensor([0, 9]), torch.tensor([9, 0, 8])]
    rows = [{"input_ids": ids} for ids in documents]
    batch = THDBatch.collate(rows, share_prefixes=shared)
    with torch.no_grad():
        got = batch.unpack(ours(**batch.hf_kwargs()).logits)
        for ids, logits in zip(documents, got, strict=True):
            want = stock(input_ids=ids[None], use_cache=False).logits[0]
            torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-5)


def test_padding_tokens_on_other_ranks_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [torch.tensor([9, 1, 11, 1, 7]), torch.tensor([1, 9, 1])]
    align = Alignment.for_(cp=2)
    batch = THDBatch.collate([{"input_ids": ids} for ids in rows], align=align, pad_to=64)
    inputs = batch.input_ids[None], batch.position_ids[None]
    expected = roberta.padded_positions(*inputs, 1, batch.boundaries)
    assert int(expected.max()) == 6  # padding needs no larger table
    monkeypatch.setattr(ShardBoundaries, "whole", lambda shard, real: (batch.input_ids != 1).long())
    for rank in range(2):
        shard = shard_batch(batch, group=None, cp=2, rank=rank)
        inputs = shard.input_ids[None], shard.position_ids[None]
        got = roberta.padded_positions(*inputs, 1, shard.boundaries)
        assert torch.equal(got, expected[:, shard.boundaries.layout.own])


# ---- Releases that take what we hand over under other names


class Llama4TextAttention(torch.nn.Module):
    floor_scale = 8192

    def forward(self, hidden_states: torch.Tensor, kept: Any = None) -> torch.Tensor:
        return torch.arange(hidden_states.shape[1]) + kept.get_seq_length()


class CountsInAnotherWay(torch.nn.Module):
    floor_scale = 8192


class RobertaEmbeddings(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        return input_ids


class NumbersTokensItself(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position_table = torch.nn.Embedding(8, 4, padding_idx=1)


@pytest.mark.parametrize(
    ("family", "layer", "message"),
    [
        (llama4, Llama4TextAttention, "takes no cache under a known name"),
        (llama4, CountsInAnotherWay, "is not among the layers that were checked"),
        (roberta, RobertaEmbeddings, "takes input_ids, places. So 'thd' cannot"),
        (roberta, NumbersTokensItself, "is not among the layers that were checked"),
    ],
)
def test_a_layer_that_is_not_known_is_refused_when_its_model_is_prepared(
    family: Any, layer: type[torch.nn.Module], message: str
) -> None:
    with pytest.raises(ValueError, match=f"{layer.__name__} .*{message}"):
        family.adapt_layers(torch.nn.Sequential(layer()))


def test_a_rope_that_no_layer_computes_is_refused() -> None:
    model: Any = build_rope("llama dynamic", "thd")
    model.model.rotary_emb = torch.nn.Identity()
    with pytest.raises(
        ValueError,
        match=r"Llama\w+ has a rope of type dynamic, .* but no layer with a rope_type and frequencies",
    ):
        prepare(model)


def test_a_dynamic_rope_without_its_counter_is_refused() -> None:
    rotary = SimpleNamespace(original_max_seq_len=4, longest_so_far=4, inv_freq=torch.ones(2))
    with pytest.raises(ValueError, match="SimpleNamespace .* no max_seq_len_cached, so 'thd' cannot"):
        ropes._reset_frequencies(rotary, "", torch.device("cpu"))


# ---- Ropes whose frequencies depend on length


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ROPES)
def test_ropes_turn_each_sequence_as_if_alone(name: str, compiled: bool) -> None:
    torch._dynamo.reset()
    model = build_rope(name, "thd")
    run = torch.compile(model, backend="eager") if compiled else model
    for lengths in (LENGTHS, LENGTHS[::-1], (3, 5)):  # short ones again after long ones
        rows = documents(lengths)
        batch = THDBatch.collate([{"input_ids": ids} for ids in rows])
        with torch.no_grad():
            got = batch.unpack(run(**batch.hf_kwargs()).logits)
        for ids, logits in zip(rows, got, strict=True):
            torch.testing.assert_close(logits, alone(name, ids), rtol=1e-4, atol=1e-5)


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
    model = build_rope(name, "thd")
    run = torch.compile(model, backend="eager") if compiled else model
    kwargs = batch.hf_kwargs() if told else pickle.loads(pickle.dumps(batch.hf_kwargs()))  # nothing known
    with torch.no_grad(), packed(batch) if told else nullcontext():
        got = batch.unpack(run(**kwargs).logits)
    for ids, logits in zip(rows, got, strict=True):
        torch.testing.assert_close(logits, alone(name, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ROPES)
def test_a_recorded_step_takes_short_sequences_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_rope(name, "thd")
    monkeypatch.setattr("lightning_thd.models.families.ropes.shapes_are_static", lambda: True)
    short, long = (THDBatch.collate([{"input_ids": ids} for ids in documents(x)]) for x in ((3, 12), (3, 13)))
    model(**short.hf_kwargs())
    with pytest.raises(ValueError, match=r"longer than 12 tokens.*in a recorded step.*at most 12 tokens"):
        model(**long.hf_kwargs())


# ---- Zero embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trailing_pad_leaves_gradients_finite(dtype: torch.dtype) -> None:
    model = build("gemma3n_text", "Gemma3nForCausalLM", "thd").to(dtype)
    batch = THDBatch.collate([{"input_ids": ids} for ids in samples()], pad_to=48)
    targets = batch.targets[None]
    model(**batch.hf_kwargs(), labels=targets, shift_labels=targets).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
