import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def _sum_of_ranks() -> tuple[int, float]:
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return dist.get_rank(), float(value)


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("planted")
    dist.barrier()


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    time.sleep(60)


def test_ranks_talk_to_each_other_and_results_come_in_rank_order() -> None:
    assert run_ranks(_sum_of_ranks, 4) == [(rank, 6.0) for rank in range(4)]


def test_the_error_and_the_death_of_one_rank_end_all() -> None:
    with pytest.raises(RankError, match="KeyError: 'planted'"):
        run_ranks(_raise_on_rank_one, 2)
    with pytest.raises(RankError, match=r"ranks \[1\] died with exit codes \[7\]"):
        run_ranks(_die_on_rank_one, 2)
