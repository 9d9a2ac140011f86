"""Messages about steps that no graph can hold, which no other test of the room meets."""

from __future__ import annotations

import pytest
import torch

from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.callbacks.cuda_graph import CaptureError, GraphedStep, lint_capture
from lightning_thd.parallel import shard_batch
from tests.cuda_graph.support import BUCKETS, graphed, random_batch
from tests.tiny import tiny_llama


def test_steps_that_are_no_functions() -> None:
    with pytest.raises(TypeError, match=r"function is None; wanted step\(module, batch\)"):
        GraphedStep(None, tiny_llama(), buckets=BUCKETS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"step is a str, 'loss'; wanted step\(module, batch\), or None"):
        lint_capture(tiny_llama(), random_batch(1, count=4), step="loss")  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["needed", "ring"])
def test_exchanges_that_follow_the_lengths(way: str) -> None:
    batch = THDBatch.collate(
        [{"input_ids": torch.arange(8)}, {"input_ids": torch.arange(4)}], align=Alignment.for_(cp=2)
    )
    part = shard_batch(batch, group=None, cp=2, rank=0, communication=way)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=f"'{way}' exchanges as many keys as the lengths .*Use 'ulysses'"):
        graphed(tiny_llama())(part)
