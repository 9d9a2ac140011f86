"""lint_capture names every line, leaves the module alone, and is silent about a clean step."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.callbacks.cuda_graph import lint_capture
from lightning_thd.parallel.shard import shard_batch
from tests.cuda_graph.support import GraphModule, random_batch
from tests.models.families import build
from tests.tiny import TinyModule, tiny_llama


def bad_step(model: nn.Module, batch: THDBatch) -> Tensor:
    loss = causal_lm_loss(model, batch)
    a = loss.item()
    b = batch.targets.tolist()[0]
    c = batch.targets[batch.targets > 0].sum()
    d = (batch.targets > 0).nonzero().sum()
    if loss > 0:
        loss = loss + 0.0
    e = torch.tensor(3.0)
    f = len(batch.lengths)
    g = torch.repeat_interleave(batch.cu_seqlens.diff().long()).sum()
    return loss + 0.0 * (a + b + c + d + e + f + g)


def test_every_line_is_named_once() -> None:
    lines, start = inspect.getsourcelines(bad_step)
    report = lint_capture(tiny_llama(), random_batch(1, count=4), step=bad_step)
    named = [int(x.where.split(":")[1].split()[0]) - start for x in report.findings if x.where]
    texts = [lines[i].strip() for i in named]
    assert [t[0] for t in texts] == list("abcdief" + "g")
    assert len(report.findings) == 8
    assert not report.ok


@pytest.mark.parametrize("name", ["mistral", "bamba"])
def test_families_are_clean(name: str) -> None:
    report = lint_capture(build(name, "thd").train(), random_batch(1, count=6, longest=8))
    assert report.ok, str(report)


def test_lightning_modules_are_judged_by_their_training_step_and_left_as_they_were() -> None:
    module, batch = GraphModule(), random_batch(1, count=4)
    before = {name: p.clone() for name, p in module.state_dict().items()}
    state = torch.get_rng_state()
    report = lint_capture(module, batch)
    assert report.ok, str(report)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], p) for name, p in module.state_dict().items())
    assert all(p.grad is None and p.device.type == "cpu" for p in module.parameters())
    assert "log" not in module.__dict__
    messages = [x.message for x in lint_capture(TinyModule(), batch).findings]
    assert "batch.sequence_ids" in messages[0]
    assert any("TinyModule.seen" in message for message in messages)


class Index(GraphModule):
    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (batch_idx + 1)


def test_the_batch_index_is_found() -> None:
    report = lint_capture(Index(), random_batch(1, count=4))
    assert [x.message.split(",")[0] for x in report.findings] == [
        "the step uses argument 2 of training_step (batch_idx)"
    ]


def test_messages() -> None:
    with pytest.raises(ValueError, match="lint_capture got a Tensor; wanted a THDBatch"):
        lint_capture(tiny_llama(), torch.ones(1))  # type: ignore[arg-type]
    whole = THDBatch.collate([{"input_ids": torch.ones(8, dtype=torch.int64)}])
    with pytest.raises(ValueError, match="got a THDShard, whose attention needs the other ranks"):
        lint_capture(tiny_llama(), shard_batch(whole, group=None, cp=2, rank=0))
