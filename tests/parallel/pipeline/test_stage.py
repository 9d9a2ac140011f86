"""Stages on real gloo ranks, driven by the schedule alone: losses and gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.models.qwen3_moe import modeling_qwen3_moe

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.loss import causal_lm_logprobs
from lightning_thd.parallel.pipeline import Schedule, make_schedule
from lightning_thd.parallel.pipeline.channel import Channel
from lightning_thd.parallel.pipeline.cut import cut_model, language_model_of, plan_split
from tests.parallel.pipeline.support import in_flight, make_model
from tests.ranks import run_ranks
from tests.tiny import sequences


def exact_balance(
    logits: tuple[torch.Tensor, ...], experts: int, top_k: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Switch Transformers' loss (arXiv:2101.03961, equations 4 to 6) over all layers' slots, in fp64."""
    likely = torch.cat([layer.double() for layer in logits]).softmax(-1)
    chosen = torch.zeros_like(likely).scatter_(1, likely.topk(top_k).indices, 1.0)
    return experts * (chosen.mean(0) * likely.mean(0)).sum()


def batches(n: int) -> list[THDBatch]:
    samples = sequences(4 * n)
    return [THDBatch.collate(samples[4 * i : 4 * i + 4], loss_scale=0.01) for i in range(n)]


def another_channel() -> Channel:
    return Channel(down=dist.new_group(), up=dist.new_group(), fixed_dtype=torch.float64)


def run_stage(family: str, chunks: int, n: int) -> dict[str, Any]:
    model = make_model(family)
    if family == "lfm2":
        model.register_forward_hook(lambda *_: None)  # it may read the logits, so they are computed
    channel = Channel(down=dist.new_group(), up=dist.new_group())
    stage = cut_model(model, channel, stages_per_rank=chunks, balance=another_channel)
    data = batches(n)
    with torch.no_grad():
        values = [float(loss_of(model, batch)) for batch in data]
        logp = causal_lm_logprobs(model, data[0]).logp

    losses: dict[Any, torch.Tensor] = {}
    most = 0
    for op in make_schedule(channel.ranks, n, chunks=chunks).programs[channel.rank]:
        stage.begin(op.chunk)
        if op.forward:
            loss = loss_of(model, data[op.microbatch])
            losses[op.microbatch, op.chunk] = stage.seam.join(loss, has_head=stage.holds_head)
        else:
            losses.pop((op.microbatch, op.chunk)).backward()
        most = max(most, len(losses))  # each keeps the activations of its pass alive
    stage.begin(None)
    channel.finish()
    if stage.balance is not None:
        stage.balance.channel.finish()

    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"values": values, "logp": logp, "gradients": gradients, "in_flight": most}


def loss_of(model: Any, batch: THDBatch) -> torch.Tensor:
    """Return a batch's loss with the balancing loss of a stock model, which a whole model computes itself."""
    return causal_lm_loss(model, batch, router_balance="microbatch")


def run_stages(cases: list[tuple[str, int]], n: int) -> list[dict[str, Any]]:
    return [run_stage(*case, n) for case in cases]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [("llama", 1), ("gemma3", 2), ("lfm2", 1), ("gpt2", 1), ("balanced", 2)]),
        pytest.param(4, [("qwen3_moe", 1), ("balanced", 1)], marks=pytest.mark.slow),
    ],
)
def test_stages_together_are_the_model(
    ranks: int, cases: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 4
    results = run_ranks(run_stages, ranks, cases, n)
    monkeypatch.setattr(modeling_qwen3_moe, "load_balancing_loss_func", exact_balance)
    for i, (family, chunks) in enumerate(cases):
        compare(family, make_schedule(ranks, n, chunks=chunks), [of_rank[i] for of_rank in results])


def compare(family: str, schedule: Schedule, ranks: list[dict[str, Any]]) -> None:
    """Compare the stages of a model, one a rank, with the whole model."""
    model = make_model(family)
    data = batches(schedule.microbatches)
    losses = [loss_of(model, batch) for batch in data]
    torch.stack(losses).sum().backward()
    logp = causal_lm_logprobs(model, data[0]).logp
    gradients = {name: p.grad for name, p in model.named_parameters()}

    assert [rank["in_flight"] for rank in ranks] == [in_flight(program) for program in schedule.programs]
    embedding = next(iter(gradients))
    together: dict[str, torch.Tensor] = {}  # the gradients of all ranks, under the names of the whole model
    for rank in ranks:
        assert rank["values"] == pytest.approx([float(loss.detach()) for loss in losses], rel=1e-10)
        assert torch.allclose(rank["logp"], logp, rtol=1e-6, atol=1e-7)
        for name, gradient in rank["gradients"].items():  # a tied weight has a part on two ranks
            whole = name if name in gradients else embedding
            together[whole] = together.get(whole, 0) + gradient

    assert set(together) == {name for name, gradient in gradients.items() if gradient is not None}
    for name, gradient in together.items():
        of_whole = gradients[name]
        assert of_whole is not None
        assert torch.allclose(gradient, of_whole, rtol=1e-9, atol=1e-9), (family, name)


def test_the_plan_and_the_model_agree() -> None:
    split = plan_split(language_model_of(make_model("llama")), 2)
    assert [i for stage in range(2) for i in split.layers(stage)] == list(range(5))
