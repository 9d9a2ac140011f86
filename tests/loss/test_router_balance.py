"""The routers' loss of packs, against the sum over sequences that are run one at a time, in fp64."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from torch import Tensor

from benchmarks.families import build as tiny
from benchmarks.families import families as tiny_families
from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.alignment import Alignment
from lightning_thd.loss import router_balance
from lightning_thd.loss.head_call import HeadCall
from lightning_thd.loss.router_balance import routers_for
from lightning_thd.parallel import routers
from lightning_thd.parallel.routers import _is_switch
from lightning_thd.parallel.shard import shard_batch
from tests.strategies.jobs import family_model
from tests.tiny import checkpoint_activations, largest_error, nll, sequences

# Token 0 has a zero embedding in some families, and routers then choose between equal logits.
SAMPLES = [
    {"input_ids": one["input_ids"] % 63 + 1, "labels": one["labels"]} for one in sequences(7, labels=True)
]
TOKENS = sum(len(sample["input_ids"]) for sample in SAMPLES)
COEFFICIENT = 0.7
Z = 0.3


def expert_model(family: str) -> Any:
    return exact(family_model(family))


def exact(model: Any) -> Any:
    """Give a model a large coefficient, and norms and routers in fp64; transformers' compute in fp32."""
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = COEFFICIENT
    for module in model.modules():
        if "Router" in type(module).__name__ or hasattr(module, "variance_epsilon"):
            module.forward = functools.partial(in_fp64, module)
    return model


class Wide:
    """torch, whose fp32 is fp64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def in_fp64(module: Any, hidden: Tensor) -> Any:
    kind = type(module)
    if kind.__name__ == "MixtralTopKRouter":  # its fp32 is the method of a tensor
        logits = torch.nn.functional.linear(hidden.reshape(-1, module.hidden_dim), module.weight)
        weights, chosen = logits.softmax(-1).topk(module.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), chosen
    with mock.patch.object(sys.modules[kind.__module__], "torch", Wide()):
        return kind.forward(module, hidden)


def alone(model: Any, sample: dict[str, Any]) -> list[Tensor]:
    """Return the router logits of a sequence that is run alone, ``[n, E]`` of each layer."""
    ids = torch.as_tensor(sample["input_ids"]).long()
    outputs = model(input_ids=ids[None], use_cache=False, output_router_logits=True)
    return [logits.double() for logits in outputs.router_logits]


def balance(logits: Sequence[Tensor], top_k: int, *, sigmoid: bool = False) -> Tensor:
    """Balance one set of tokens by the paper's equations, a token at a time."""
    experts = logits[0].shape[1]
    rows = sum(len(layer) for layer in logits)
    total = torch.zeros((), dtype=torch.float64)
    likely = torch.zeros(experts, dtype=torch.float64)
    chosen = [0] * experts
    for layer in logits:
        for token in layer:
            scores = token.sigmoid() / token.sigmoid().sum() if sigmoid else token.exp() / token.exp().sum()
            likely = likely + scores
            for expert in scores.argsort(descending=True)[:top_k].tolist():
                chosen[expert] += 1
    for expert in range(experts):
        total = total + chosen[expert] / rows * likely[expert] / rows
    return experts * total


def one_at_a_time(model: Any, samples: Sequence[dict[str, Any]], *, z: float = 0.0, **how: Any) -> Tensor:
    """Return the loss of a step: tokens, balance of each sequence by its tokens, and z-loss."""
    results = [nll(model, sample) for sample in samples]
    loss = sum(total for total, _ in results) / sum(count for _, count in results)
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    for sample in samples:
        logits = alone(model, sample)
        n = len(sample["input_ids"])
        loss = loss + n / tokens * COEFFICIENT * balance(logits, model.config.num_experts_per_tok, **how)
        lse = torch.stack([token.logsumexp(0) ** 2 for layer in logits for token in layer])
        loss = loss + z * n / tokens * lse.mean()
    return loss


def grads(model: Any) -> dict[str, Tensor]:
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_a_step_does_not_depend_on_its_packing(family: str) -> None:
    model = expert_model(family)
    expected = one_at_a_time(model, SAMPLES, z=Z)
    expected.backward()
    gradients = grads(model)
    rng = np.random.default_rng(0)
    targets = sum(int((sample["labels"][1:] != -100).sum()) for sample in SAMPLES)

    for microbatches, how in (
        (1, {}),
        (2, {}),
        (3, {"align": Alignment(sequence_multiple=4, total_multiple=8)}),
    ):
        order = np.array_split(rng.permutation(len(SAMPLES)), microbatches)
        total = 0.0
        for ids in order:
            batch = THDBatch.collate(
                [SAMPLES[i] for i in ids],
                loss_scale=microbatches / targets,
                token_scale=microbatches / TOKENS,
                **how,
            )
            loss = causal_lm_loss(model, batch, router_balance="sequence", router_z_loss=Z) / microbatches
            loss.backward()
            total += float(loss.detach())
        assert total == pytest.approx(float(expected.detach()), rel=1e-9)
        assert largest_error(grads(model), gradients) < 1e-9


def test_routers_of_families_without_a_balancing_loss_by_the_scores_they_compare() -> None:
    model = expert_model("deepseek_v3")
    with torch.no_grad():
        expected = one_at_a_time(model, SAMPLES[:3], sigmoid=True)
        loss = causal_lm_loss(model, THDBatch.collate(SAMPLES[:3]), router_balance="sequence")
    assert float(loss) == pytest.approx(float(expected), rel=1e-9)


@torch.no_grad()
def test_the_model_adds_nothing_of_its_own_beside() -> None:
    model = expert_model("qwen3_moe")
    batch = THDBatch.collate(SAMPLES)
    expected = causal_lm_loss(model, batch, router_balance="sequence")
    model.config.output_router_logits = True
    assert causal_lm_loss(model, batch, router_balance="sequence") == expected
    # The z-loss leaves the balance as it is.
    with_z = causal_lm_loss(model, batch, router_z_loss=Z) - causal_lm_loss(model, batch)
    model.config.output_router_logits = False
    only_z = causal_lm_loss(model, batch, router_z_loss=Z) - causal_lm_loss(model, batch)
    model.config.router_z_loss_coef = Z
    assert float(with_z) == pytest.approx(float(only_z), rel=1e-6)
    without = causal_lm_loss(model, batch, router_z_loss=0.0)
    assert float(causal_lm_loss(model, batch) - without) == pytest.approx(float(only_z), rel=1e-9)


@torch.no_grad()
def test_the_config_asks_for_the_balance_and_each_sequence_is_balanced_for_itself() -> None:
    model = expert_model("qwen3_moe")
    batch = THDBatch.collate(SAMPLES)
    without = causal_lm_loss(model, batch)
    model.config.output_router_logits = True
    by_default = causal_lm_loss(model, batch)
    over_all_slots = causal_lm_loss(model, batch, router_balance="microbatch")
    assert by_default == causal_lm_loss(model, batch, router_balance="sequence")
    assert float(by_default) == pytest.approx(float(one_at_a_time(model, SAMPLES)), rel=1e-9)
    assert abs(float(over_all_slots - by_default)) > 1e-4
    assert float(by_default - without) > 0.1


def test_dense_models_and_models_without_a_balancing_function_need_no_choice() -> None:
    for family in ("llama", "deepseek_v3"):
        model = family_model(family)
        model.config.output_router_logits = True
        assert causal_lm_loss(model, THDBatch.collate(SAMPLES[:2])).isfinite()


def over_a_step(model: Any, microbatches: Sequence[Sequence[dict[str, Any]]]) -> list[Tensor]:
    """Balance each microbatch by the choices of the step so far, as shares of all its tokens."""
    top_k = model.config.num_experts_per_tok
    tokens = sum(len(s["input_ids"]) for m in microbatches for s in m)
    seen = 0
    balances = list[Tensor]()
    for part in microbatches:
        logits = [alone(model, sample) for sample in part]
        likely = torch.cat([layer for layers in logits for layer in layers]).softmax(-1)
        seen = seen + torch.zeros_like(likely).scatter(1, likely.topk(top_k).indices, 1.0).sum(0)
        share = seen / (seen.sum() / top_k)
        balances.append(COEFFICIENT * len(share) * (share * likely.sum(0)).sum() / len(logits[0]) / tokens)
    return balances


@torch.no_grad()
def test_a_step_is_balanced_over_its_tokens_so_far() -> None:
    model = expert_model("gpt_oss")
    parts = (SAMPLES[:3], SAMPLES[3:])
    packs = [THDBatch.collate(part, loss_scale=0.0, token_scale=2 / TOKENS) for part in parts]
    packs = [pack.replace(microbatch=i) for i, pack in enumerate(packs)]
    balances = []

    for pack in packs:
        balances.append(float(causal_lm_loss(model, pack, router_balance="step")) / 2)
        # Lightning may evaluate inside an accumulated step
        causal_lm_loss(model, THDBatch.collate(SAMPLES, token_scale=0.0), router_balance="step")

    assert balances == pytest.approx([float(x) for x in over_a_step(model, parts)], rel=1e-9)
    again = float(causal_lm_loss(model, packs[0], router_balance="step")) / 2
    assert again == balances[0]  # a step begins with its first microbatch

    whole = THDBatch.collate(SAMPLES, loss_scale=0.0, token_scale=1 / TOKENS)
    one = causal_lm_loss(model, whole, router_balance="step")
    logits = [layer for sample in SAMPLES for layer in alone(model, sample)]

    assert float(one) == pytest.approx(COEFFICIENT * float(balance(logits, 2)), rel=1e-9)


@torch.no_grad()
def test_sequences_that_share_slots() -> None:
    model = expert_model("qwen3_moe")
    begin = SAMPLES[0]["input_ids"]
    samples = [{"input_ids": np.concatenate([begin, one["input_ids"]])} for one in SAMPLES[1:4]]
    balances = [
        float(causal_lm_loss(model, batch, router_balance="sequence", router_z_loss=Z))
        for batch in (THDBatch.collate(samples), THDBatch.collate(samples, share_prefixes=True))
    ]
    assert balances[1] == pytest.approx(balances[0], rel=1e-9)


@torch.no_grad()
def test_evaluations_leave_it_out() -> None:
    model = expert_model("qwen3_moe")
    batch = THDBatch.collate(SAMPLES)
    model.config.output_router_logits = True
    for mode in ("sequence", "step"):
        loss = causal_lm_loss(model, batch.replace(token_scale=0.0), router_balance=mode, router_z_loss=Z)
        model.config.output_router_logits = False
        assert float(loss) == pytest.approx(float(causal_lm_loss(model, batch)), rel=1e-12)


def test_refusals() -> None:
    batch = THDBatch.collate(SAMPLES)
    model = expert_model("qwen3_moe")
    recomputed = expert_model("qwen3_moe")
    without = expert_model("deepseek_v3")
    without.config.router_aux_loss_coef = without.router_aux_loss_coef = None
    sequence: dict[str, Any] = {"router_balance": "sequence"}
    cases: list[tuple[Any, THDBatch, dict[str, Any], str]] = [
        (family_model("llama"), batch, sequence, "LlamaForCausalLM returns none"),
        (model, batch.replace(token_scale=None), sequence, "needs batch.token_scale"),
        (model, batch, {"router_z_loss": -0.1}, "router_z_loss=-0.1; wanted a finite number of 0 or more"),
        (model, batch, {"router_balance": "batch"}, "wanted one of microbatch, sequence, step"),
        (without, batch, sequence, "config has router_aux_loss_coef"),
        (recomputed, batch, sequence, "use_reentrant=False"),
        (recomputed, batch, {}, "use_reentrant=False"),
    ]

    checkpoint_activations(recomputed, use_reentrant=True)
    recomputed.enable_input_require_grads()
    recomputed.config.output_router_logits = True
    aligned = THDBatch.collate(SAMPLES, align=Alignment(sequence_multiple=4, total_multiple=4))
    shard = shard_batch(aligned, group=None, cp=2, rank=0)
    balancing = expert_model("qwen3_moe")
    balancing.config.output_router_logits = True
    cases.append((balancing, shard, {"router_balance": "microbatch"}, "one rank's shard.*'sequence'"))

    for one, packed, how, words in cases:
        with pytest.raises(ValueError, match=words):
            causal_lm_loss(one, packed, **how)


def test_in_a_pipeline_a_message_names_the_option_that_is_on() -> None:
    model = family_model("mixtral")
    batch = THDBatch.collate(SAMPLES)
    model.config.output_router_logits = True
    in_pipeline = mock.patch.object(router_balance, "stage_of")
    without = mock.patch.object(HeadCall, "balance_coefficient", None)
    words = "^router_balance='microbatch' needs the coefficient"
    with in_pipeline, without, pytest.raises(ValueError, match=words):
        routers_for(HeadCall.of(model), batch, "microbatch")


def test_recomputed_layers_are_balanced_once() -> None:
    model = expert_model("qwen3_moe")
    batch = THDBatch.collate(SAMPLES)
    causal_lm_loss(model, batch, router_balance="sequence").backward()
    expected = grads(model)
    checkpoint_activations(model, use_reentrant=False)
    causal_lm_loss(model, batch, router_balance="sequence").backward()
    assert largest_error(grads(model), expected) < 1e-9


@pytest.mark.parametrize("router_balance", ["sequence", "step"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_no_sum_of_the_balance(router_balance: Any, dtype: torch.dtype) -> None:
    """The sums are those of a long sequence in 40 layers, of which fp16 has no number."""
    model = expert_model("mixtral")
    batch = THDBatch.collate(SAMPLES)
    _is_switch.cache_clear()
    with _DtypeContextManager(dtype):  # as Lightning's "bf16-true" and "16-true" around a training step
        routers: Any = routers_for(HeadCall.of(model), batch, router_balance)
    sums = torch.rand(len(SAMPLES) + 1, 2 * routers.experts.number + 1) * 1e5
    with torch.autocast("cpu", dtype):
        balance = routers._of_sums(sums, torch.tensor(TOKENS))
    expected = routers._of_sums(sums.double(), torch.tensor(TOKENS))
    torch.testing.assert_close(balance.double(), expected, rtol=1e-5, atol=0.0)


class Weighs(torch.nn.Module):
    """A router that weights its experts by a function of its logits."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, config.hidden_size))
        self.function = config.function
        self.top_k = config.top_k

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.T
        weights, chosen = self.function(logits).topk(self.top_k, dim=-1)
        return logits, 2.5 * weights / weights.sum(-1, keepdim=True), chosen


@pytest.mark.parametrize(
    ("function", "top_k", "scores"),
    [
        (lambda logits: logits.softmax(-1), 2, "softmax"),
        (lambda logits: logits.sigmoid(), 3, "sigmoid"),
        (lambda logits: logits.exp().sqrt(), 2, None),  # of unknown formula
        (lambda logits: logits.softmax(-1), 1, None),  # one weight of 1 says nothing
    ],
)
def test_the_scores_of_a_router_are_found_by_trying_it(function: Any, top_k: int, scores: str | None) -> None:
    before = torch.get_rng_state()
    config = SimpleNamespace(hidden_size=8, function=function, top_k=top_k)
    assert routers._scores_in(Weighs, config) == scores
    assert routers._scores_in(torch.nn.Linear, config) is None
    assert torch.equal(torch.get_rng_state(), before)


FORMULAS = {
    "deepseek_v2": "softmax",
    "deepseek_v3": "sigmoid",
    "lfm2_moe": "sigmoid",
    "longcat_flash": "softmax",
}


@pytest.mark.parametrize("family", FORMULAS)
def test_the_scores_of_families_are_those_of_their_papers(family: str) -> None:
    model_class = tiny_families("causal")[family]
    assert routers.scores_of(tiny(family, model_class, "eager")) == FORMULAS[family]
