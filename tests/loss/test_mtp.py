from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_thd.batch import THDBatch
from lightning_thd.loss import causal_lm_loss, mtp_targets
from tests.loss.families import build
from tests.loss.support import make_batch
from tests.ranks import run_ranks


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), depth=st.integers(0, 10))
def test_each_sequence_by_itself(lengths: list[int], depth: int) -> None:
    batch = THDBatch.collate(
        [{"input_ids": list(range(100 * i, 100 * i + n))} for i, n in enumerate(lengths)]
    )
    expected = []
    for i, n in enumerate(lengths):
        ids = list(range(100 * i, 100 * i + n))
        expected += [ids[j + 1 + depth] if j + 1 + depth < n else -100 for j in range(n)]
    assert mtp_targets(batch.targets, batch.cu_seqlens_padded, depth).tolist() == expected


def test_worked_example_and_message() -> None:
    targets, offsets = torch.tensor([6, 7, -100, 9, -100]), torch.tensor([0, 3, 5], dtype=torch.int32)
    assert mtp_targets(targets, offsets, 1).tolist() == [7, -100, -100, -100, -100]
    with pytest.raises(ValueError, match="depth=-1; wanted 0 or more. 0 is the next token"):
        mtp_targets(targets, offsets, -1)


def test_a_model_that_calls_its_head_again_predicts_further_tokens() -> None:
    model = build("Granite")
    batch = make_batch(ignored=0.2)
    further = nn.Linear(32, 32, bias=False).double()
    inner = model.forward

    def forward(**kwargs: object) -> object:
        outputs = inner(**kwargs, output_hidden_states=True)
        model.lm_head(further(outputs.hidden_states[-1]))
        return outputs

    model.forward = forward
    parameters = [*model.parameters(), *further.parameters()]
    loss = causal_lm_loss(model, batch, mtp_weight=0.5)
    ours = torch.autograd.grad(loss, parameters)
    outputs = model(**batch.hf_kwargs())

    def part(logits: Tensor, depth: int) -> Tensor:
        targets = mtp_targets(batch.targets, batch.cu_seqlens_padded, depth)
        return F.cross_entropy(logits[0], targets, reduction="sum") * batch.loss_scale

    second = model.lm_head(further(outputs.hidden_states[-1])) / model.config.logits_scaling
    expected = part(outputs.logits, 0) + 0.5 * part(second, 1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, parameters))


def sharded_targets(layout: str) -> bool:
    from lightning_thd.alignment import Alignment
    from lightning_thd.loss.causal_lm import targets_after
    from lightning_thd.parallel import shard_batch

    align = Alignment.for_(cp=2)
    batch = THDBatch.collate([{"input_ids": list(range(n))} for n in (5, 9, 1, 13)], align=align)
    shard = shard_batch(batch, group=dist.group.WORLD, layout=layout)  # type: ignore[arg-type]
    whole = mtp_targets(batch.targets, batch.cu_seqlens_padded, 2)
    assert (whole != -100).sum() == 3 + 7 + 11 - 3
    return torch.equal(targets_after(shard, 2), whole[shard.layout.own])


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous"])
def test_context_parallel_shards(layout: str) -> None:
    assert all(run_ranks(sharded_targets, 2, layout))
