from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.loss import (
    causal_lm_logprobs,
    causal_lm_loss,
    causal_lm_loss_and_stats,
    dft_loss,
    mtp_targets,
)
from lightning_thd.models import register_thd
from tests.loss.families import build, names
from tests.loss.support import gradients, make_batch, oracle
from tests.models.families import build as family_model
from tests.ranks import run_ranks
from tests.tiny import largest_error, sequences, tiny_llama

pytest.importorskip("transformers")
register_thd()


def assert_same(model: nn.Module, batch: THDBatch) -> None:
    # the oracle has the balancing loss of a stock model, which is over all slots
    loss = causal_lm_loss(model, batch, router_balance="microbatch")
    expected = oracle(model, batch)
    ours = gradients(model, loss)
    theirs = gradients(model, expected)
    assert len(ours) > 5
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert largest_error(ours, theirs) < 1e-9


@pytest.mark.parametrize("name", names())
def test_every_family_equals_its_own_logits(name: str) -> None:
    model = build(name)
    assert_same(model, make_batch(ignored=0.4, pad_to=32))
    # again, with what the first call saw of the logits
    assert_same(model, make_batch())


@pytest.mark.parametrize("name", ["Gemma2", "Cohere"])
def test_logprobs_follow_the_models_scale_then_the_temperature(name: str) -> None:
    model = build(name)
    batch = make_batch(ignored=0.4)
    logprobs = causal_lm_logprobs(model, batch, temperature=0.5)
    log_p = (model(**batch.hf_kwargs()).logits[0] / 0.5).log_softmax(-1)
    counts = batch.targets != -100
    expected = log_p.gather(1, batch.targets.clamp_min(0)[:, None]).squeeze(1) * counts
    entropy = -(log_p.exp() * log_p).sum(-1) * counts
    torch.testing.assert_close((logprobs.logp, logprobs.entropy), (expected, entropy))
    assert causal_lm_logprobs(model, batch, entropy=False).entropy is None
    weights = torch.randn(len(counts), dtype=torch.float64)
    ours = gradients(model, (logprobs.logp * weights + 0.1 * logprobs.entropy).sum())
    torch.testing.assert_close(ours, gradients(model, (expected * weights + 0.1 * entropy).sum()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_statistics_are_those_of_whole_logits_and_the_loss_is_the_same(smoothing: float) -> None:
    model = build("Llama")
    batch = make_batch(ignored=0.4)
    loss, stats = causal_lm_loss_and_stats(model, batch, label_smoothing=smoothing)
    expected = causal_lm_loss(model, batch, label_smoothing=smoothing)
    assert torch.equal(loss, expected)
    torch.testing.assert_close(gradients(model, loss), gradients(model, expected), rtol=0, atol=0)
    has_target = batch.targets != -100
    logp = model(**batch.hf_kwargs()).logits[0][has_target].log_softmax(-1).detach()
    assert float(stats.entropy) == pytest.approx(float(-(logp * logp.exp()).sum()), rel=1e-12)
    assert int(stats.correct) == int((logp.argmax(-1) == batch.targets[has_target]).sum())
    assert int(stats.tokens) == int(has_target.sum()) == batch.loss_tokens
    loss, stats = causal_lm_loss_and_stats(model, make_batch(ignored=1.1))
    assert [float(value.detach()) for value in (loss, *stats)] == [0.0] * 4


SETTINGS: list[dict[str, Any]] = [
    {"recipe": recipe, "tp": tp, "cp": cp, "sequence_parallel": tp > 1}
    for recipe in (None, "tensorwise", "blockwise", "mxfp8", "nvfp4")
    for tp, cp in ((1, 1), (2, 1), (1, 2), (4, 2))
]


@pytest.mark.parametrize("family", ["llama", "mamba2", "bamba"])
def test_padding_for_alignment_changes_nothing(family: str) -> None:
    model = tiny_llama() if family == "llama" else family_model(family, "thd").double()
    padded = 0
    for seed, setting in enumerate(SETTINGS if family == "llama" else SETTINGS[1::4]):
        samples = sequences(4, labels=True, seed=seed)
        bare = THDBatch.collate(samples)
        aligned = THDBatch.collate(samples, align=Alignment.for_(**setting))
        padded += len(aligned.input_ids) > len(bare.input_ids)
        losses = [causal_lm_loss(model, batch) for batch in (aligned, bare)]
        actual, expected = ({"loss": loss.detach(), **gradients(model, loss)} for loss in losses)
        assert largest_error(actual, expected) < 1e-12, setting
    assert padded > 2


def test_smoothing_and_z_loss() -> None:
    model = build("Granite")
    batch = make_batch(ignored=0.4)
    loss = causal_lm_loss(model, batch, label_smoothing=0.1, z_loss=0.01)
    z = model(**batch.hf_kwargs()).logits[0]
    expected = F.cross_entropy(z, batch.targets, reduction="sum", label_smoothing=0.1)
    expected = expected + 0.01 * (z.logsumexp(-1).square() * (batch.targets != -100)).sum()
    torch.testing.assert_close(loss, expected * batch.loss_scale)
    model.config.z_loss_coefficient = 0.01
    torch.testing.assert_close(causal_lm_loss(model, batch, label_smoothing=0.1), loss)


# ---- Predictions further than the next token


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), depth=st.integers(0, 10))
def test_further_targets_stay_in_their_sequence(lengths: list[int], depth: int) -> None:
    batch = THDBatch.collate(
        [{"input_ids": list(range(100 * i, 100 * i + n))} for i, n in enumerate(lengths)]
    )
    expected = []
    for i, n in enumerate(lengths):
        ids = list(range(100 * i, 100 * i + n))
        expected += [ids[j + 1 + depth] if j + 1 + depth < n else -100 for j in range(n)]
    assert mtp_targets(batch.targets, batch.cu_seqlens_padded, depth).tolist() == expected


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


def sharded_targets() -> bool:
    from lightning_thd.loss.causal_lm import targets_after
    from lightning_thd.parallel import shard_batch

    align = Alignment.for_(cp=2)
    batch = THDBatch.collate([{"input_ids": list(range(n))} for n in (5, 9, 1, 13)], align=align)
    whole = mtp_targets(batch.targets, batch.cu_seqlens_padded, 2)
    assert (whole != -100).sum() == 3 + 7 + 11 - 3
    layouts = ("dual_chunk", "contiguous")
    shards = [shard_batch(batch, group=dist.group.WORLD, layout=layout) for layout in layouts]  # type: ignore[arg-type]
    return all(torch.equal(targets_after(shard, 2), whole[shard.boundaries.layout.own]) for shard in shards)


def test_further_targets_of_context_parallel_shards() -> None:
    assert all(run_ranks(sharded_targets, 2))


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_dft_weighs_each_tokens_loss_by_its_probability(share_prefixes: bool) -> None:
    model = tiny_llama()
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 1], [2, 3]]
    samples = [{"input_ids": row, "weights": 0.5 + i} for i, row in enumerate(rows)]
    batch = THDBatch.collate(samples, share_prefixes=share_prefixes)
    loss_of_batch = dft_loss(causal_lm_logprobs(model, batch).logp, batch)
    expected = torch.zeros((), dtype=torch.float64)

    for i, row in enumerate(rows):
        logp = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1].log_softmax(-1)
        picked = logp.gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
        expected = expected - (0.5 + i) * (picked * picked.detach().exp()).sum()

    expected = expected / sum((0.5 + i) * (len(row) - 1) for i, row in enumerate(rows))
    torch.testing.assert_close(loss_of_batch, expected, rtol=1e-9, atol=0)

    head = model.lm_head.weight  # below it Llama's norms round gradients to fp32
    [one], [other] = (torch.autograd.grad(loss, [head]) for loss in (loss_of_batch, expected))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_dft_of_a_token_of_weight_0_that_is_lost() -> None:
    batch = THDBatch.collate([{"input_ids": [5, 6, 7], "weights": [1.0, 0.0, 2.0]}])
    logp = torch.tensor([math.nan, -1.0, 0.0], requires_grad=True)  # the target of slot 0 has weight 0
    loss = dft_loss(logp, batch)
    assert loss.item() == pytest.approx(math.exp(-1.0))
    assert torch.autograd.grad(loss, logp)[0].tolist() == pytest.approx([0.0, -math.exp(-1.0), 0.0])
