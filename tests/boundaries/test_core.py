"""Boundaries answer what lengths say, by the device and by the host, and attention takes them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_thd import THDBatch, varlen_attention
from lightning_thd.alignment import Alignment
from lightning_thd.boundaries import Boundaries

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any)


@given(LENGTHS)
@settings(max_examples=40, deadline=None)
def test_answers_are_those_of_a_loop_over_sequences(lengths: list[int]) -> None:
    boundaries = Boundaries.from_lengths(lengths)
    owners = [i for i, n in enumerate(lengths) for _ in range(n)]
    places = [place for n in lengths for place in range(n)]
    assert boundaries.offsets.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert boundaries.lengths == boundaries.real_lengths == tuple(lengths)
    assert (boundaries.slots, boundaries.longest) == (sum(lengths), max(lengths))
    assert boundaries.seq_idx.tolist() == [owners]
    assert boundaries.positions.tolist() == places
    assert boundaries.real_slots is not None
    assert boundaries.real_slots.all()
    cuts = boundaries.chunks(4)
    begins = {sum(lengths[:i]) + place for i, n in enumerate(lengths) for place in range(0, n, 4)}
    assert set(cuts.tolist()) == {*begins, boundaries.slots}


def padded_batch() -> THDBatch:
    samples = [{"input_ids": [3] * n} for n in (3, 5, 1)]
    return THDBatch.collate(samples, align=Alignment(sequence_multiple=4, total_multiple=8), pad_to=24)


def test_a_batch_reads_its_lengths_from_its_boundaries() -> None:
    batch = padded_batch()
    boundaries = batch.boundaries
    assert (batch.lengths, batch.padded_lengths) == ((3, 5, 1), (4, 8, 4, 8))
    assert boundaries.lengths == batch.padded_lengths
    assert boundaries.real_lengths == (3, 5, 1, 8)
    assert batch.cu_seqlens is boundaries.real_offsets
    assert batch.cu_seqlens_padded is boundaries.offsets
    assert (boundaries.longest, boundaries.max_seqlen, batch.max_seqlen) == (8, 8, 8)
    real = [1] * 3 + [0] + [1] * 5 + [0] * 3 + [1] + [0] * 3 + [0] * 8
    assert boundaries.real_slots is not None
    assert boundaries.real_slots.int().tolist() == real
    kwargs = batch.hf_kwargs()
    assert kwargs["boundaries"] is boundaries
    assert kwargs["cu_seq_lens_q"] is boundaries.offsets


def test_answers_are_computed_once_and_do_not_travel() -> None:
    boundaries = padded_batch().boundaries
    assert boundaries.seq_idx is boundaries.seq_idx
    for copied in (pickle.loads(pickle.dumps(boundaries)), copy.deepcopy(boundaries)):
        assert copied.seq_idx is not boundaries.seq_idx
        assert torch.equal(copied.seq_idx, boundaries.seq_idx)
        assert copied.real_lengths == boundaries.real_lengths


def test_answers_of_an_evaluation_serve_training() -> None:
    """Lightning evaluates in inference mode, whose tensors autograd refuses."""
    boundaries = padded_batch().boundaries
    with torch.inference_mode():
        assert not boundaries.token_bounds.is_inference()
    q = torch.randn(24, 2, 8, requires_grad=True)
    varlen_attention(q, q, q, boundaries, causal=False).sum().backward()
    assert q.grad is not None


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, spans: list[tuple[int, int]], *, causal: bool
) -> list[Tensor]:
    """Return the attention of each sequence, with all scores written out."""
    outputs = []
    for a, b in spans:
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[a:b]) / q.shape[2] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(b - a, b - a).triu(1).bool(), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[a:b]))
    return outputs


@pytest.mark.parametrize("causal", [True, False])
def test_attention_takes_boundaries_and_hides_padding(causal: bool) -> None:
    batch = padded_batch()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(24, 2, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    out = batch.unpack(varlen_attention(q, k, v, batch.boundaries, causal=causal))
    expected = one_by_one(q, k, v, [(0, 3), (4, 9), (12, 13)], causal=causal)
    for got, want in zip(out, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_offsets_of_keys_default_to_those_of_queries() -> None:
    q = torch.randn(8, 2, 8)
    boundaries = Boundaries.from_lengths([3, 5])
    offsets = boundaries.offsets
    out = varlen_attention(q, q, q, boundaries)
    assert torch.equal(out, varlen_attention(q, q, q, offsets, max_seqlen_q=5))
    assert torch.equal(out, varlen_attention(q, q, q, offsets, offsets, 5, 5))


def test_shared_prefixes_attend_through_boundaries() -> None:
    rows = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [5, 6, 9]}]
    batch = THDBatch.collate(rows, share_prefixes=True)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(8, 2, 8, dtype=torch.float64, generator=generator)  # one row per slot, by its token
    x = tokens[: len(batch.input_ids)]
    got = batch.unpack(varlen_attention(x, x, x, batch.boundaries)[None])
    slots = batch.prefixes.token_slots
    whole = x[slots]
    for a, b, out in ((0, 4, got[0]), (4, 7, got[1])):
        want = one_by_one(whole, whole, whole, [(a, b)], causal=True)[0]
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def test_a_row_of_whole_paths_leads_back_to_the_slots() -> None:
    rows = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [5, 6, 9]}]
    assert THDBatch.collate(rows).boundaries.unfolded() is None
    batch = THDBatch.collate(rows, share_prefixes=True)
    unfolded = batch.boundaries.unfolded()
    assert unfolded is not None
    paths = unfolded.gather(batch.input_ids).split(list(unfolded.boundaries.lengths))
    assert sorted(path.tolist() for path in paths) == [[5, 6, 7, 8], [5, 6, 9]]
    assert torch.equal(unfolded.keep(torch.cat(paths)), batch.input_ids)


def test_refusals() -> None:
    q = torch.randn(8, 2, 8)
    boundaries = Boundaries.from_lengths([3, 5])
    with pytest.raises(ValueError, match="q has 7 rows, but the boundaries have 8 slots"):
        varlen_attention(q[:7], q[:7], q[:7], boundaries)
    heads_first = q.transpose(0, 1)
    with pytest.raises(ValueError, match=r"q has shape \[2, 8, 8\].*slots first. Pass q.transpose\(0, 1\)"):
        varlen_attention(heads_first, heads_first, heads_first, boundaries)
    with pytest.raises(ValueError, match=r"k has shape \[2, 8, 8\].*Pass k.transpose\(0, 1\)"):
        varlen_attention(q, heads_first, heads_first, boundaries)
    with pytest.raises(TypeError, match="got boundaries and, beside them, offsets"):
        varlen_attention(q, q, q, boundaries, boundaries.offsets)
    with pytest.raises(TypeError, match="without max_seqlen_q, the longest sequence"):
        varlen_attention(q, q, q, boundaries.offsets)
    with pytest.raises(ValueError, match="wanted the tokens of one sequence or more"):
        Boundaries.from_lengths([])
    with pytest.raises(ValueError, match="add up to 2147483648 tokens; wanted at most 2147483647"):
        Boundaries.from_lengths([2**31 - 1, 1])
    with pytest.raises(AttributeError, match="cannot be assigned or deleted"):
        boundaries.slots = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="runs from .* must run from 0 to 9"):
        assert Boundaries(offsets=boundaries.offsets, slots=9, max_seqlen=5).lengths
