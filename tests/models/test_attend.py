"""The attention function by itself: dense rows, explicit boundaries, and everything it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_thd.attention import entry
from lightning_thd.batch import THDBatch
from lightning_thd.models import packed
from lightning_thd.models.attend import chunk_offsets, thd_attention
from lightning_thd.models.masks import tell_limit
from lightning_thd.models.pack import Pack, Scope, scoped
from lightning_thd.parallel.context import layout
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
def test_rows_without_boundaries_are_one_sequence_each(causal: bool) -> None:
    q, k, v = qkv(3, 5)
    out, weights = thd_attention(Layer(is_causal=causal), q, k, v, None)
    allowed = torch.ones(5, 5, dtype=torch.bool)
    torch.testing.assert_close(out, oracle(q, k, v, allowed.tril() if causal else allowed))
    assert weights is None


def test_boundaries_given_as_arguments_split_the_row() -> None:
    q, k, v = qkv(1, 7)
    out, _ = thd_attention(Layer(), q, k, v, None, cu_seq_lens_q=offsets(4, 7), max_length_q=4)
    block = torch.block_diag(torch.ones(4, 4), torch.ones(3, 3)).bool().tril()
    torch.testing.assert_close(out, oracle(q, k, v, block))


def test_the_ambient_pack_splits_the_row_and_ends_with_its_context() -> None:
    q, k, v = qkv(1, 7)
    batch = THDBatch.collate([{"input_ids": [1] * 4}, {"input_ids": [1] * 3}])
    explicit, _ = thd_attention(Layer(), q, k, v, None, cu_seq_lens_q=batch.cu_seqlens, max_length_q=4)
    with packed(batch):
        ambient, _ = thd_attention(Layer(), q, k, v, None)
    after, _ = thd_attention(Layer(), q, k, v, None)
    assert torch.equal(explicit, ambient)
    assert not torch.allclose(after, ambient)


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


def test_cross_attention_of_plain_rows() -> None:
    q, k, v = qkv(2, 3, keys=5)
    out, _ = thd_attention(Layer(is_causal=False), q, k, v, None)
    torch.testing.assert_close(out, oracle(q, k, v, torch.ones(3, 5, dtype=torch.bool)))


def test_a_key_value_cache_is_refused() -> None:
    q, k, v = qkv(1, 1, keys=5)
    with pytest.raises(ValueError, match=r"1 queries and 5 keys.*cache through 'thd'.*use_cache=False"):
        thd_attention(Layer(), q, k, v, None)


def test_rows_and_lengths_that_do_not_fit_the_pack_are_refused() -> None:
    q, k, v = qkv(1, 6)
    with (
        packed(THDBatch.collate([{"input_ids": [1, 2, 3]}])),
        pytest.raises(ValueError, match=r"1 x 6 queries and 6 keys while .* pack of 3 slots"),
    ):
        thd_attention(Layer(), q, k, v, None)
    q, k, v = qkv(2, 3)
    with pytest.raises(ValueError, match=r"attention got 2 rows together with cu_seq_lens_q"):
        thd_attention(Layer(), q, k, v, None, cu_seq_lens_q=offsets(3), max_length_q=3)
    with pytest.raises(ValueError, match=r"without max_length_q"):
        thd_attention(Layer(), *qkv(1, 3), None, cu_seq_lens_q=offsets(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, r"attention_mask of shape \(1, 1, 3, 3\)"),
        ({"dropout": 0.1}, r"attention dropout 0\.1.*Set attention_dropout .* to 0\.0"),
        ({"position_bias": torch.zeros(1)}, r"passes position_bias to its attention"),
        ({"never_heard_of": 1}, r"passes never_heard_of to its attention"),
        ({"output_attentions": True}, r"never form.*'eager'"),
    ],
)
def test_what_would_change_the_result_is_refused(arguments: dict[str, Any], message: str) -> None:
    arguments = {"attention_mask": None, **arguments}
    with pytest.raises(ValueError, match=message):
        thd_attention(Layer(), *qkv(1, 3), **arguments)


@pytest.mark.parametrize(("lengths", "chunk"), [((5, 2), 4), ((8, 4, 1, 9), 4), ((1, 1), 4), ((7,), 3)])
def test_chunks_cut_sequences_at_their_multiples(lengths: tuple[int, ...], chunk: int) -> None:
    pieces = [min(chunk, n - start) for n in lengths for start in range(0, n, chunk)]
    ends = torch.tensor(pieces).cumsum(0).tolist()
    got = chunk_offsets(cu_seqlens_from_lengths(lengths), sum(lengths), chunk).tolist()
    assert got[: len(pieces) + 1] == [0, *ends]
    assert set(got[len(pieces) + 1 :]) <= {sum(lengths)}


def test_a_shard_is_not_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "in_use", False)  # put back afterwards
    shard = shard_batch(THDBatch.collate([{"input_ids": range(8)}]), group=None, cp=2, rank=0)
    with pytest.raises(ValueError, match=r"chunks of 2.*at most 2, or train this model without context"):
        thd_attention(
            Layer(),
            *qkv(1, 4),
            tell_limit(2, chunk=True, device=None),
            cu_seq_lens_q=shard.cu_seqlens_padded,
            max_length_q=4,
        )


def test_keys_beside_those_of_the_pack_are_refused_whether_boundaries_are_passed_or_not() -> None:
    q, k, v = qkv(1, 7, keys=9)
    batch = THDBatch.collate([{"input_ids": [1] * 4}, {"input_ids": [1] * 3}])
    with pytest.raises(ValueError, match=r"from 7 slots of a pack to 9 keys, so it adds keys of its own"):
        thd_attention(Layer(), q, k, v, None, cu_seq_lens_q=batch.cu_seqlens, max_length_q=4)
    for causal in (True, False):
        with packed(batch), pytest.raises(ValueError, match=r"adds keys of its own"):
            thd_attention(Layer(is_causal=causal), q, k, v, None)


def test_a_mask_that_the_model_makes_for_itself_is_refused_as_its_own() -> None:
    q, k, v = qkv(1, 3)
    layer = Layer()
    with (
        scoped(Scope(None, None, module=layer)),
        pytest.raises(ValueError, match=r"Layer makes an attention mask of its own, \(1, 1, 3, 3\)"),
    ):
        thd_attention(layer, q, k, v, torch.zeros(1, 1, 3, 3))


@pytest.mark.parametrize(
    ("asked", "stated", "causal"),
    [
        (("causal",), False, True),
        (("bidirectional",), True, False),
        (("causal", "bidirectional"), True, True),
        ((), False, False),
    ],
)
def test_the_masks_a_model_asks_for_say_what_its_layers_see(
    asked: tuple[str, ...], stated: bool, causal: bool
) -> None:
    q, k, v = qkv(1, 5)
    layer = Layer(is_causal=stated)
    with scoped(Scope(None, None, module=layer, masks=asked)):
        out, _ = thd_attention(layer, q, k, v, None)
    allowed = torch.ones(5, 5, dtype=torch.bool)
    torch.testing.assert_close(out, oracle(q, k, v, allowed.tril() if causal else allowed))


def test_a_layer_of_a_model_with_both_masks_that_is_not_causal_is_refused() -> None:
    layer, batch = Layer(is_causal=False), THDBatch.collate([{"input_ids": [1] * 5}])
    scope = Scope(Pack.from_batch(batch), None, module=layer, masks=("causal", "bidirectional"))
    with scoped(scope), pytest.raises(ValueError, match="a causal and a bidirectional mask"):
        thd_attention(layer, *qkv(1, 5), None)


def test_layers_of_one_kind_choose_their_kernel_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    choose = entry.known_choice
    monkeypatch.setattr(entry, "known_choice", lambda *a: (chosen.append(a), choose(*a))[1])
    q, k, v = (x.float() for x in qkv(1, 7))
    batch = THDBatch.collate([{"input_ids": [1] * 4}, {"input_ids": [1] * 3}])
    plain = thd_attention(Layer(), q, k, v, None, cu_seq_lens_q=batch.cu_seqlens, max_length_q=4)[0]
    chosen.clear()
    with packed(batch):
        for _ in range(3):
            out, _ = thd_attention(Layer(), q, k, v, None)
            assert torch.equal(out, plain)
        assert len(chosen) == 1
        thd_attention(Layer(), q, k, v, None, sliding_window=2)
        thd_attention(Layer(is_causal=False), q, k, v, None)
        thd_attention(Layer(), q.double(), k.double(), v.double(), None)
        with torch.autocast("cpu", torch.bfloat16):
            assert thd_attention(Layer(), q, k, v, None)[0].dtype == torch.bfloat16
        assert len(chosen) == 5
        assert thd_attention(Layer(), q, k, v, None)[0].dtype == torch.float32
        with pytest.raises(ValueError, match="7 slots of a pack to 5 keys"):
            thd_attention(Layer(), q, k[:, :, :5], v[:, :, :5], None)
    assert len(chosen) == 5
