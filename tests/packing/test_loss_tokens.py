"""The weights of a step's loss tokens are those of its pieces; where they cannot be known, they are None."""

import numpy as np
import pytest

from lightning_thd.packing import PackPlanner, Packs, Sequences


@pytest.mark.parametrize("oversize", ["truncate", "split", "own_pack"])
@pytest.mark.parametrize("batch", [Packs(2), Sequences(5)])
def test_the_steps_of_an_epoch_add_up_to_all_targets(oversize: str, batch: Packs | Sequences) -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 50)
    options = {"global_batch": batch, "oversize": oversize, "window": 9}
    planner = PackPlanner(lengths, 16, **options, loss_tokens=lengths - 1)
    every = PackPlanner(lengths, 16, **options, loss_tokens="all")
    counted = [planner.step(0, k, 2).loss_tokens for k in range(len(planner))]
    assert counted == [every.step(0, k, 2).loss_tokens for k in range(len(planner))]
    used = np.minimum(lengths, 16) if oversize == "truncate" else lengths  # a split one is shifted whole
    assert sum(counted) == sum(used - 1)


def test_parts_of_partly_masked_sequences_are_unknown() -> None:
    whole = PackPlanner([5, 8, 3, 1], 8, global_batch=Sequences(4), loss_tokens=[2, 0, 2, 0])
    assert whole.step(0, 0, 2).loss_tokens == 4

    truncated = PackPlanner([20], 8, global_batch=Sequences(1), oversize="truncate", loss_tokens=[7])
    assert truncated.step(0, 0, 1).loss_tokens is None

    split = PackPlanner([20], 8, global_batch=Packs(1), oversize="split", loss_tokens=[7])
    assert [split.step(0, k, 1).loss_tokens for k in range(3)] == [None] * 3

    all_masked = PackPlanner([20], 8, global_batch=Packs(1), oversize="split", loss_tokens=[0])
    assert [all_masked.step(0, k, 1).loss_tokens for k in range(3)] == [0] * 3


def test_a_step_holds_the_scale_that_makes_its_mean() -> None:
    """Summed losses times the scale, averaged over ranks and microbatches, are the mean over loss tokens."""
    lengths = np.random.default_rng(1).integers(2, 16, 40)
    planner = PackPlanner(lengths, 16, global_batch=Packs(6), loss_tokens="all")
    plan = planner.step(0, 0, 2)
    targets = [[(lengths[ids] - 1).sum() for ids in rank] for rank in plan.indices_by_rank()]
    assert plan.weights is not None
    assert plan.weights[0].tolist() == targets
    assert plan.weights[1].tolist() == [[len(ids) for ids in rank] for rank in plan.indices_by_rank()]
    assert plan.scales() == (6 / np.sum(targets), 6 / plan.sequences)
    first = sum(rank[0] for rank in targets)  # an epoch ends after the first microbatch of each rank
    assert plan.scales(counted=1)[0] == 6 / first
    assert PackPlanner([1], 8, global_batch=Packs(1), loss_tokens="all").step(0, 0).scales()[0] == 0.0


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([5, 3], "Sequence 0 has 5 tokens but 5 loss tokens. The first token of a sequence is not a target"),
        ([2, -1], "Sequence 1 has 4 tokens but -1 loss tokens"),
    ],
)
def test_refuses_counts_that_cannot_be(counts: list[int], message: str) -> None:
    planner = PackPlanner([5, 4], 8, global_batch=Sequences(2), loss_tokens=counts)
    with pytest.raises(ValueError, match=message):
        planner.step(0, 0, 1).scales()
