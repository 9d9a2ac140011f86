"""The attention function by itself: dense rows, explicit boundaries, and everything it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.boundaries.core import chunk_offsets
from lightning_thd.models import packed
from lightning_thd.models.attend import thd_attention
from lightning_thd.models.masks import UnreadMask
from lightning_thd.models.pack import Scope, scoped
from lightning_thd.parallel.shard import shard_batch
from lightning_thd.seqlens import cu_seqlens_from_lengths


class Layer(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def qkv(rows: int, slots: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 4, slots, 8), (rows, 2, keys or slots, 8), (rows, 2, keys or slots, 6))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def offsets(*ends: int) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32)


def oracle(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
def test_the_window_of_the_layer_counts_its_own_key(causal: bool) -> None:
    q, k, v = qkv(1, 6)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    allowed = (distance >= 0) & (distance < 3) if causal else distance.abs() < 3
    by_layer, _ = thd_attention(Layer(is_causal=causal, sliding_window=3), q, k, v, None)
    by_argument, _ = thd_attention(Layer(is_causal=causal), q, k, v, None, sliding_window=3)
    torch.testing.assert_close(by_layer, oracle(q, k, v, allowed))
    assert torch.equal(by_layer, by_argument)
    # Passed as None: this layer is one without a window, whatever its module remembers.
    full, _ = thd_attention(Layer(is_causal=causal, sliding_window=3), q, k, v, None, sliding_window=None)
    assert not torch.allclose(full, by_layer)


@pytest.mark.parametrize(("lengths", "chunk"), [((5, 2), 4), ((8, 4, 1, 9), 4), ((1, 1), 4), ((7,), 3)])
def test_chunks_cut_sequences_at_their_multiples(lengths: tuple[int, ...], chunk: int) -> None:
    pieces = [min(chunk, n - start) for n in lengths for start in range(0, n, chunk)]
    ends = torch.tensor(pieces).cumsum(0).tolist()
    got = chunk_offsets(cu_seqlens_from_lengths(lengths), sum(lengths), chunk).tolist()
    assert got[: len(pieces) + 1] == [0, *ends]
    assert set(got[len(pieces) + 1 :]) <= {sum(lengths)}


def test_a_shard_is_not_cut_into_chunks() -> None:
    shard = shard_batch(THDBatch.collate([{"input_ids": range(8)}]), group=None, cp=2, rank=0)
    with pytest.raises(ValueError, match=r"chunks of 2.*at most 2, or train this model without context"):
        thd_attention(
            Layer(),
            *qkv(1, 4),
            UnreadMask("llama4_text", chunk=2),
            boundaries=shard.boundaries,
        )


def batch_of(*lengths: int) -> THDBatch:
    return THDBatch.collate([{"input_ids": [1] * n} for n in lengths])


@pytest.mark.parametrize(
    ("asked", "stated", "causal", "keys"),
    [
        ((), True, True, 5),
        ((), False, False, 5),
        ((), False, False, 7),
        (("causal",), False, True, 5),
        (("bidirectional",), True, False, 5),
        (("causal", "bidirectional"), True, True, 5),
    ],
)
def test_rows_are_one_sequence_each_and_masks_asked_for_say_what_layers_see(
    asked: tuple[str, ...], stated: bool, causal: bool, keys: int
) -> None:
    q, k, v = qkv(3, 5, keys=keys)
    layer = Layer(is_causal=stated)
    with scoped(Scope(None, None, module=layer, masks=asked)):
        out, weights = thd_attention(layer, q, k, v, None)
    allowed = torch.ones(5, keys, dtype=torch.bool)
    torch.testing.assert_close(out, oracle(q, k, v, allowed.tril() if causal else allowed))
    assert weights is None


def test_layers_of_each_kind_see_the_sequences_of_a_pack() -> None:
    q, k, v = (x.float() for x in qkv(1, 7))
    batch = batch_of(4, 3)
    offsets = {"cu_seq_lens_q": batch.cu_seqlens, "max_length_q": 4}
    kinds: list[dict[str, Any]] = [{}, {"sliding_window": 2}, {"is_causal": False}]
    block = torch.block_diag(torch.ones(4, 4), torch.ones(3, 3)).bool()
    expected = [thd_attention(Layer(), q, k, v, None, **offsets, **kind)[0] for kind in kinds]

    torch.testing.assert_close(expected[0], oracle(q, k, v, block.tril()))
    torch.testing.assert_close(expected[2], oracle(q, k, v, block))

    with packed(batch):
        for _ in range(2):
            for kind, want in zip(kinds, expected, strict=True):  # as arguments, and of the layer itself
                assert torch.equal(thd_attention(Layer(), q, k, v, None, **kind)[0], want)
                assert torch.equal(thd_attention(Layer(**kind), q, k, v, None)[0], want)
        with torch.autocast("cpu", torch.bfloat16):
            assert thd_attention(Layer(), q, k, v, None)[0].dtype == torch.bfloat16
        assert thd_attention(Layer(), q.double(), k.double(), v.double(), None)[0].dtype == torch.float64
        assert thd_attention(Layer(), q, k, v, None)[0].dtype == torch.float32

    with packed(THDBatch.collate([{"input_ids": [1] * 3}] * 2, align=Alignment.for_(cp=2))):
        rows = qkv(2, 5)  # beside a pack of two padded sequences, as an encoder's are
        beside = thd_attention(Layer(is_causal=False), *rows, None)[0]

    torch.testing.assert_close(beside, oracle(*rows, torch.ones(5, 5, dtype=torch.bool)))
    assert not torch.allclose(thd_attention(Layer(), q, k, v, None)[0], expected[0])


MASK = torch.zeros(1, 1, 3, 3)


@pytest.mark.parametrize(
    ("rows", "slots", "keys", "given", "message"),
    [
        (1, 1, 5, {}, r"1 queries and 5 keys.*cache through 'thd'.*use_cache=False"),
        (2, 3, 3, {"cu_seq_lens_q": offsets(3), "max_length_q": 3}, "got 2 rows together with cu_seq_lens_q"),
        (1, 3, 3, {"cu_seq_lens_q": offsets(3)}, "without max_length_q"),
        (1, 7, 9, {"cu_seq_lens_q": offsets(4, 7), "max_length_q": 4}, "7 slots of a pack to 9 keys"),
        (1, 3, 3, {"attention_mask": MASK}, r"attention_mask of shape \(1, 1, 3, 3\)"),
        (1, 3, 3, {"dropout": 0.1}, r"attention dropout 0\.1.*Set attention_dropout .* to 0\.0"),
        (1, 3, 3, {"position_bias": torch.zeros(1)}, "passes position_bias to its attention"),
        (1, 3, 3, {"never_heard_of": 1}, "passes never_heard_of to its attention"),
        (1, 3, 3, {"output_attentions": True}, "passes output_attentions .*'eager'"),
    ],
)
def test_what_would_change_the_result_is_refused(
    rows: int, slots: int, keys: int, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        thd_attention(Layer(), *qkv(rows, slots, keys), **{"attention_mask": None, **given})


@pytest.mark.parametrize(
    ("slots", "keys", "layer", "message"),
    [
        (6, 6, {}, "1 x 6 queries and 6 keys while .* pack of 7 slots"),
        (7, 9, {"is_causal": False}, "adds keys of its own"),
    ],
)
def test_rows_and_keys_that_are_not_those_of_the_pack_are_refused(
    slots: int, keys: int, layer: dict[str, bool], message: str
) -> None:
    with packed(batch_of(4, 3)), pytest.raises(ValueError, match=message):
        thd_attention(Layer(**layer), *qkv(1, slots, keys), None)


@pytest.mark.parametrize(
    ("masks", "mask", "message"),
    [
        ((), MASK, r"Layer makes its own attention mask, \(1, 1, 3, 3\)"),
        (("causal", "bidirectional"), None, "a causal and a bidirectional mask"),
    ],
)
def test_masks_that_nobody_can_tell_are_refused(
    masks: tuple[str, ...], mask: Tensor | None, message: str
) -> None:
    layer = Layer(is_causal=False)
    scope = Scope(batch_of(3).boundaries, None, module=layer, masks=masks)
    with scoped(scope), pytest.raises(ValueError, match=message):
        thd_attention(layer, *qkv(1, 3), mask)
