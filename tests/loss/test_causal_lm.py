from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_thd.batch import THDBatch
from lightning_thd.loss import causal_lm_logprobs, causal_lm_loss, dft_loss, mtp_targets
from lightning_thd.models import register_thd
from tests.loss.families import VOCAB, build, names
from tests.loss.support import gradients, make_batch, oracle
from tests.ranks import run_ranks
from tests.tiny import tiny_llama

pytest.importorskip("transformers")
register_thd()


def assert_same(model: nn.Module, batch: THDBatch, *, rtol: float = 1e-9, **kwargs: Any) -> None:
    loss = causal_lm_loss(model, batch, **kwargs)
    ours = gradients(model, loss)
    expected = oracle(model, batch)
    theirs = gradients(model, expected)
    assert loss.item() == pytest.approx(expected.item(), rel=rtol)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 5
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm() / gradient.norm().clamp_min(1e-9)
        assert error.item() < rtol, name


@pytest.mark.parametrize("name", names())
def test_every_family_equals_its_own_logits(name: str) -> None:
    model = build(name)
    assert_same(model, make_batch(ignored=0.4, pad_to=32))
    # again, with what the first call saw of the logits
    assert_same(model, make_batch())


def test_the_sum_over_microbatches_is_the_loss_of_the_step() -> None:
    """Law 2: the mean of the microbatches' losses is the sum over loss tokens by their number."""
    model = build("Llama")
    parts = [(5, 9), (1, 13), (2, 2)]
    batches = [make_batch(lengths=lengths, ignored=0.4) for lengths in parts]
    count = sum(batch.loss_tokens for batch in batches)
    scaled = [batch.replace(loss_scale=len(parts) / count) for batch in batches]
    mean = torch.stack([causal_lm_loss(model, batch) for batch in scaled]).mean()
    total = sum(
        F.cross_entropy(model(**batch.hf_kwargs()).logits[0], batch.targets, reduction="sum")
        for batch in batches
    )
    torch.testing.assert_close(mean, total / count)


def test_logprobs_follow_the_models_scale_then_the_temperature() -> None:
    for name in ("Gemma2", "Cohere"):
        model, batch = build(name), make_batch(ignored=0.4)
        found = causal_lm_logprobs(model, batch, temperature=0.5)
        log_p = (model(**batch.hf_kwargs()).logits[0] / 0.5).log_softmax(-1)
        counts = batch.targets != -100
        expected = log_p.gather(1, batch.targets.clamp_min(0)[:, None]).squeeze(1)
        torch.testing.assert_close(found.logp, torch.where(counts, expected, 0.0))
        entropy = torch.where(counts, -(log_p.exp() * log_p).sum(-1), 0.0)
        torch.testing.assert_close(found.entropy, entropy)
        assert causal_lm_logprobs(model, batch, entropy=False).entropy is None
        weights = torch.randn(len(counts), dtype=torch.float64)
        ours = gradients(model, (found.logp * weights + 0.1 * found.entropy).sum())
        theirs = gradients(model, (torch.where(counts, expected, 0.0) * weights + 0.1 * entropy).sum())
        for key, gradient in theirs.items():
            torch.testing.assert_close(ours[key], gradient)


def test_smoothing_and_z_loss() -> None:
    model, batch = build("Granite"), make_batch(ignored=0.4)
    loss = causal_lm_loss(model, batch, label_smoothing=0.1, z_loss=0.01)
    z = model(**batch.hf_kwargs()).logits[0]
    expected = F.cross_entropy(z, batch.targets, reduction="sum", label_smoothing=0.1)
    expected = expected + 0.01 * (z.logsumexp(-1).square() * (batch.targets != -100)).sum()
    torch.testing.assert_close(loss, expected * batch.loss_scale)
    model.config.z_loss_coefficient = 0.01
    torch.testing.assert_close(causal_lm_loss(model, batch, label_smoothing=0.1), loss)


def test_an_unforeseen_scale_is_seen_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """HyperCLOVA X multiplies where Granite divides: the guess is wrong once."""
    model, batch = build("HyperCLOVAX"), make_batch()
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    expected = oracle(model, batch)
    calls.clear()
    torch.testing.assert_close(causal_lm_loss(model, batch), expected)
    assert len(calls) == 2
    torch.testing.assert_close(causal_lm_loss(model, batch), expected)
    assert len(calls) == 3


def test_another_attention_is_refused() -> None:
    model = build("Llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM runs attn_implementation='sdpa'.*'thd'"):
        causal_lm_loss(model, make_batch())


def test_models_without_a_head_and_targets_out_of_range_are_refused() -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match=r"got a Linear, wanted a Hugging Face causal language model"):
        causal_lm_loss(nn.Linear(2, 2), batch)
    with pytest.raises(
        ValueError, match=r"got a LlamaModel, wanted a Hugging Face causal.*AutoModelForCausalLM"
    ):
        causal_lm_loss(build("Llama").model, batch)
    wrong = batch.replace(targets=torch.full_like(batch.targets, VOCAB))
    with pytest.raises(ValueError, match=rf"targets\[0\] is {VOCAB}, wanted 0 to {VOCAB - 1}"):
        causal_lm_loss(build("Llama"), wrong)
    with pytest.raises(ValueError, match="temperature=0"):
        causal_lm_logprobs(build("Llama"), batch, temperature=0.0)


def test_a_model_that_returns_no_logits_is_refused() -> None:
    model, batch = build("Llama"), make_batch()
    original = model.forward
    model.forward = lambda **kwargs: original(**kwargs, return_dict=False)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM returned a tuple without logits.*return_dict"):
        causal_lm_loss(model, batch)


def test_hidden_states_that_do_not_match_the_targets_are_refused() -> None:
    model, batch = build("Llama"), make_batch()
    original = model.forward
    model.forward = lambda **kwargs: original(**kwargs, logits_to_keep=3)
    with pytest.raises(ValueError, match=r"\[1, 3, 32\] for 28 targets.*logits_to_keep"):
        causal_lm_loss(model, batch)


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
    from lightning_thd.alignment import Alignment
    from lightning_thd.loss.causal_lm import targets_after
    from lightning_thd.parallel import shard_batch

    align = Alignment.for_(cp=2)
    batch = THDBatch.collate([{"input_ids": list(range(n))} for n in (5, 9, 1, 13)], align=align)
    whole = mtp_targets(batch.targets, batch.cu_seqlens_padded, 2)
    assert (whole != -100).sum() == 3 + 7 + 11 - 3
    layouts = ("dual_chunk", "contiguous")
    shards = [shard_batch(batch, group=dist.group.WORLD, layout=layout) for layout in layouts]  # type: ignore[arg-type]
    return all(torch.equal(targets_after(shard, 2), whole[shard.layout.own]) for shard in shards)


def test_further_targets_of_context_parallel_shards() -> None:
    assert all(run_ranks(sharded_targets, 2))


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_dft_weighs_each_tokens_loss_by_its_probability(share_prefixes: bool) -> None:
    model, rows = tiny_llama(), [[5, 6, 7, 8, 9], [5, 6, 7, 1], [2, 3]]
    samples = [{"input_ids": row, "weights": 0.5 + i} for i, row in enumerate(rows)]
    batch = THDBatch.collate(samples, share_prefixes=share_prefixes)
    found = dft_loss(causal_lm_logprobs(model, batch).logp, batch)
    wanted = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(rows):
        logp = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1].log_softmax(-1)
        picked = logp.gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
        wanted = wanted - (0.5 + i) * (picked * picked.detach().exp()).sum()
    wanted = wanted / sum((0.5 + i) * (len(row) - 1) for i, row in enumerate(rows))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
    head = model.lm_head.weight  # below it Llama's norms round gradients to fp32
    [one], [other] = (torch.autograd.grad(loss, [head]) for loss in (found, wanted))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
