import os
import subprocess
import threading
import time
from pathlib import Path

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


def _say_who_and_wait(file: str) -> None:
    with open(file, "a") as said:
        said.write(f"{os.getpid()}\n")
    time.sleep(60)


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    time.sleep(60)


def test_ranks_talk_to_each_other_and_results_come_in_rank_order() -> None:
    assert run_ranks(_sum_of_ranks, 4) == [(rank, 6.0) for rank in range(4)]


def test_the_error_of_one_rank_ends_all_and_is_shown() -> None:
    with pytest.raises(RankError, match="KeyError: 'planted'"):
        run_ranks(_raise_on_rank_one, 2)


def test_a_rank_that_dies_is_noticed() -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] died with exit codes \[7\]"):
        run_ranks(_die_on_rank_one, 2)


def test_ranks_end_with_the_process_that_asked_for_them(tmp_path: Path) -> None:
    file = tmp_path / "ranks"
    asking = subprocess.Popen(["sleep", "60"])

    def end() -> None:
        while not file.exists() or file.read_text().count("\n") < 2:
            time.sleep(0.1)
        asking.kill()
        asking.wait()

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(RankError, match=r"died with exit codes \[1\]"):
        run_ranks(_say_who_and_wait, 2, str(file), asking=asking.pid)
    ending.join()
