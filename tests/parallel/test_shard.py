"""A shard holds its slots of every field and the layout of its pack, and says what cannot be cut."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch

from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.parallel import shard_batch
from lightning_thd.parallel.context.dynamic_step import DynamicStep
from lightning_thd.parallel.context.layout import ShardLayout
from lightning_thd.parallel.context.partition import rank_indices
from lightning_thd.parallel.shard import cut_step
from tests.tiny import sequences

LAYOUTS = ["dual_chunk", "contiguous"]


def pack(layout: str = "dual_chunk", cp: int = 2) -> THDBatch:
    align = Alignment.for_(cp=cp, layout=layout)
    return THDBatch.collate(
        sequences(7, labels=True), align=align, sequence_ids=range(10, 17), loss_scale=0.25
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fields(layout: str) -> None:
    batch = pack(layout)
    for rank in range(2):
        shard = shard_batch(batch, group=None, cp=2, rank=rank, layout=layout)
        slots_of_rank = torch.from_numpy(rank_indices(batch.padded_lengths, cp=2, rank=rank, layout=layout))
        for name in ("input_ids", "targets", "position_ids"):
            assert torch.equal(getattr(shard, name), getattr(batch, name)[slots_of_rank])

        boundaries = shard.boundaries
        assert torch.equal(boundaries.positions, batch.boundaries.positions[slots_of_rank])
        assert boundaries.offsets[-1] == boundaries.slots == len(slots_of_rank)
        assert (boundaries.real_offsets is None) == (layout == "contiguous")  # which pads no sequence
        real = boundaries.offsets if boundaries.real_offsets is None else boundaries.real_offsets
        assert len(real) == len(boundaries.offsets) == len(batch.cu_seqlens)
        assert int(boundaries.offsets.diff().max()) == max(boundaries.lengths) == shard.max_seqlen
        assert (real.diff() <= boundaries.offsets.diff()).all()

        for name in ("stats", "lengths", "padded_lengths", "sequence_ids"):
            assert getattr(shard, name) == getattr(batch, name)
        assert shard.loss_scale == 2 * batch.loss_scale
        assert [len(rows) for rows in shard] == [len(rows) for rows in batch]


def test_a_shard_of_one_slot_takes_the_logits_a_model_gives_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = THDBatch.collate([{"input_ids": [5, 6]}])
    shards = [shard_batch(batch, group=None, cp=2, rank=rank, layout="contiguous") for rank in range(2)]
    logits = torch.arange(6.0).view(2, 3)  # [T, V], of which each rank holds [1, 1, V]
    monkeypatch.setattr(
        "lightning_thd.parallel.context.layout.gather_pack", lambda own, _: torch.cat([own, logits[1:]])
    )
    (whole,) = shards[0].unpack(logits[None, :1])
    assert torch.equal(whole, logits)
    with pytest.raises(TypeError, match=r"unpack\(\) got a list"):
        shards[0].unpack([1.0])  # type: ignore[arg-type]


def test_m_rope_positions_and_extras_of_one_value_a_slot() -> None:
    batch = pack()
    slots = len(batch.input_ids)
    positions = torch.arange(3 * slots).view(3, slots)
    types = torch.arange(slots)[None]
    batch = batch.replace(position_ids=positions, extras={"token_type_ids": types})
    shard = shard_batch(batch, group=None, cp=2, rank=1)
    assert torch.equal(shard.position_ids, positions[:, shard.boundaries.layout.own])
    assert torch.equal(shard.hf_kwargs()["token_type_ids"], types[:, shard.boundaries.layout.own])


def test_attention_on_a_shard_takes_boundaries_only() -> None:
    """Offsets of a shard hide the keys of other ranks, so a batch does not give them."""
    shard = shard_batch(pack(), group=None, cp=2, rank=0)
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        with pytest.raises(ValueError, match=f"batch.{name} was read, but 2 .* Pass batch.boundaries"):
            getattr(shard, name)
    assert not {"cu_seq_lens_q", "cu_seq_lens_k"} & shard.hf_kwargs().keys()
    assert shard.boundaries.call().exchange is shard.boundaries.layout


def test_a_shard_and_its_layout_are_freed_without_a_collection() -> None:
    shard = shard_batch(pack(), group=None, cp=2, rank=0)
    layout = weakref.ref(shard.boundaries.layout)
    gc.disable()  # no cycle: reference counts alone free a batch
    try:
        del shard
        assert layout() is None
    finally:
        gc.enable()


def test_messages() -> None:
    batch = pack()
    with_images = batch.replace(extras={"pixel_values": torch.zeros(5, 3)})
    with pytest.raises(ValueError, match=r"'pixel_values' of shape \(5, 3\).*context_parallel_size=1"):
        shard_batch(with_images, group=None, cp=2, rank=0)
    with pytest.raises(ValueError, match="wants a multiple of 4.*align"):
        shard_batch(THDBatch.collate([{"input_ids": [1] * 6}]), group=None, cp=2, rank=0)

    shard = shard_batch(batch, group=None, cp=2, rank=0)
    with pytest.raises(ValueError, match=r"unpack\(\) got a tensor of shape \(3,\), but the shard has"):
        shard.unpack(torch.zeros(3))
    with pytest.raises(ValueError, match="cannot move to meta. Move the THDBatch"):
        shard.to("meta")
    assert shard.to("cpu:0") is shard
    with pytest.raises(TypeError, match="Send the THDBatch"):
        pickle.dumps(shard)
    with pytest.raises(ValueError, match="communication='gossip'; wanted one of auto, all_gather, ulysses"):
        ShardLayout([8], cp=2, rank=0, communication="gossip")
    with pytest.raises(TypeError, match="group is None; wanted a process group, or cp= and rank="):
        shard_batch(batch, group=None)
    with pytest.raises(ValueError, match=r"over 4 ranks, but groups exist only of \[\] ranks"):
        cut_step(DynamicStep([batch], [4], 0), {})
