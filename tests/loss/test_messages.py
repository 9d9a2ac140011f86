"""What losses refuse: one row for each kind of refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertLMHeadModel

from lightning_thd.batch import THDBatch
from lightning_thd.loss import (
    PackedRollouts,
    causal_lm_logprobs,
    causal_lm_loss,
    dft_loss,
    fused_linear_cross_entropy,
    fused_linear_distillation,
    fused_linear_logprobs,
    mtp_targets,
    policy,
    preference,
)
from lightning_thd.parallel.shard import shard_batch
from tests.loss.families import VOCAB, build
from tests.loss.support import make_batch
from tests.ranks import pretended_ranks

ARGUMENTS = {"hidden": torch.zeros(4, 16), "weight": torch.zeros(101, 16), "targets": torch.arange(4)}
TAUGHT = {**ARGUMENTS, "teacher_hidden": torch.zeros(4, 8), "teacher_weight": torch.zeros(101, 8)}
logprobs = partial(fused_linear_logprobs, **ARGUMENTS)
nll = partial(fused_linear_cross_entropy, **ARGUMENTS)
distil = partial(fused_linear_distillation, **TAUGHT)
IDS = torch.tensor([[5, 6, 0], [0, 7, 8]])
MASK = torch.tensor([[1, 1, 0], [0, 1, 1]])
ROLLOUTS = PackedRollouts.from_padded(IDS, MASK, pad_to=5)
ONE = torch.zeros(2)
FIVE = torch.zeros(5)
given = {"logp": FIVE, "old_logp": FIVE, "advantages": ONE, "rollouts": ROLLOUTS}
grpo = partial(policy.grpo_loss, **given)
gspo = partial(policy.gspo_loss, **given)
ppo = partial(policy.ppo_clip_loss, **given)
dpo = partial(preference.dpo_loss, chosen=ONE, rejected=ONE, reference_chosen=ONE, reference_rejected=ONE)
BATCH = make_batch()
THREE = THDBatch.collate([{"input_ids": [1, 2, 3]}])


def loss(batch: THDBatch = BATCH, **how: Any) -> Any:
    return causal_lm_loss(build("Llama"), batch, **how)


@torch.no_grad()
def compiled(model: nn.Module) -> Any:
    return causal_lm_loss(torch.compile(model, backend="eager"), BATCH)  # type: ignore[arg-type]


def whole(**changes: Any) -> Any:
    """The loss of a model whose forward is called with other arguments."""
    model = build("Llama")
    model.forward = partial(model.forward, **changes)
    return causal_lm_loss(model, BATCH)


def shard() -> Any:
    return shard_batch(make_batch(lengths=(4,)), group=None, cp=2, rank=0)


def bert(kind: Any, **changes: Any) -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    changes["attention_probs_dropout_prob"] = 0.0
    return kind._from_config(BertConfig(**sizes, **changes), attn_implementation="thd")


def another_attention() -> None:
    model: Any = build("Llama")
    model.set_attn_implementation("sdpa")
    causal_lm_loss(model, BATCH)


CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: logprobs(temperature=0.0), r"temperature=0.0; wanted a finite number above 0.*Greedy"),
    (lambda: logprobs(chunk=0), r"chunk=0; wanted 1 or more.*tile"),
    (lambda: logprobs(softcap=math.inf), "softcap=inf"),
    (lambda: logprobs(logit_scale=0.0), "scale is 0, wanted another number"),
    (lambda: logprobs(targets=torch.tensor([0, 101, 2, 3])), r"targets\[1\] is 101, wanted 0 to 100"),
    (lambda: logprobs(targets=torch.tensor([0, 95, 2, 3]), valid_vocab_size=90), "95, wanted 0 to 89"),
    (lambda: logprobs(targets=torch.arange(5)), r"targets is \[5\].*already shifted"),
    (lambda: logprobs(targets=torch.zeros(4)), "targets is torch.float32, wanted int64"),
    (lambda: logprobs(targets=torch.arange(4).to("meta")), "targets is on meta and hidden on cpu"),
    (lambda: logprobs(weight=torch.zeros(101, 16).double()), "weight torch.float64, wanted one dtype"),
    (lambda: logprobs(weight=None), "weight is None; wanted Tensor"),
    (lambda: nll(weight=None), "weight is None; wanted Tensor"),
    (lambda: logprobs(weight=torch.zeros(101, 15)), r"hidden is \[4, 16\] and weight \[101, 15\]"),
    (lambda: logprobs(bias=torch.zeros(7)), r"bias is \[7\], wanted \[101\]"),
    (lambda: logprobs(valid_vocab_size=102), "valid_vocab_size is 102 but weight has 101 rows"),
    (lambda: logprobs(rows=torch.tensor([0, 4])), "rows goes from 0 to 4, wanted indices 0 to 3"),
    (lambda: logprobs(rows=torch.zeros(3)), "rows is torch.float32"),
    (lambda: nll(reduction="none"), "reduction.*none.*wanted.*sum"),
    (lambda: nll(label_smoothing=1.0), "label_smoothing is 1.0, wanted at least 0 and below 1"),
    (lambda: nll(z_loss=-1.0), "z_loss=-1.0; wanted a finite number of 0.0 or more"),
    (lambda: nll(token_weights=torch.ones(3)), r"token_weights is \[3\], wanted one per token"),
    (lambda: distil(kind="js"), "kind.*js.*wanted one of kl, reverse_kl, jsd"),
    (lambda: distil(alpha=1.5), "alpha is 1.5 and beta 0.5, wanted alpha from 0 to 1"),
    (lambda: distil(beta=1.0), "Instead of beta 0 use kind='kl', instead of beta 1 kind='reverse_kl'"),
    (lambda: distil(teacher_weight=torch.zeros(100, 8)), "100 rows, but.*need valid_vocab_size"),
    (another_attention, r"LlamaForCausalLM runs attn_implementation='sdpa'.*'thd'"),
    (lambda: causal_lm_loss(nn.Linear(2, 2), BATCH), "got a Linear, wanted a Hugging Face causal"),
    (lambda: causal_lm_loss(bert(BertForMaskedLM), BATCH), "of BertForMaskedLM attends to later tokens"),
    (lambda: causal_lm_loss(bert(BertLMHeadModel), BATCH), "later tokens.*Set is_decoder=True"),
    (lambda: compiled(bert(BertLMHeadModel)), "of BertLMHeadModel attends to later tokens"),
    (lambda: loss(BATCH.replace(targets=BATCH.targets + VOCAB)), f"wanted 0 to {VOCAB - 1}"),
    (lambda: causal_lm_logprobs(build("Llama"), BATCH, temperature=0.0), "temperature=0"),
    (lambda: whole(return_dict=False), "returned a tuple without logits.*return_dict"),
    (lambda: whole(logits_to_keep=3), r"\[1, 3, 32\] for 28 slots.*logits_to_keep"),
    (lambda: loss(reduction="mean"), "reduction.*mean.*wanted.*tokens.*sequences"),
    (lambda: loss(weights=torch.ones(3)), r"weights is \[3\], wanted \[28\], one per slot"),
    (lambda: loss(label_smoothing="0.1"), "label_smoothing is a str.*wanted a number"),
    (lambda: loss(BATCH.replace(sequence_scale=None), reduction="sequences"), "needs batch.sequence_scale"),
    (lambda: dft_loss(ONE, THREE), r"logp is \[2\], wanted \[3\], one per slot"),
    (lambda: mtp_targets(ONE, THREE.cu_seqlens, 1), r"targets is torch.float32 \[2\], wanted int64"),
    (lambda: preference.sequence_sums(ONE, THREE), r"values is torch.float32 \[2\], wanted floats \[3\]"),
    (
        lambda: preference.sequence_sums(
            ONE, shard_batch(make_batch(lengths=(4,)), group=None, cp=2, rank=0)
        ),
        "The batch is one rank's shard, whose slots hold parts of sequences",
    ),
    (lambda: ROLLOUTS.pack(torch.zeros(3, 2)), r"pack\(\) got \[3, 2\], wanted \[2, 3, ...\]"),
    (lambda: ROLLOUTS.unpack(torch.zeros(6)), r"unpack\(\) got \[6\], but this pack has 5 slots"),
    (lambda: ROLLOUTS.unpack(FIVE, of="row"), "of.*row.*wanted.*prediction.*token"),  # type: ignore[arg-type]
    (lambda: PackedRollouts.from_padded(IDS, MASK[:1]), r"shapes \[\[2, 3\], \[1, 3\]"),
    (lambda: PackedRollouts.from_padded(IDS.float(), MASK), "input_ids is torch.float32; wanted an integer"),
    (lambda: PackedRollouts.from_padded(IDS, MASK * 0), "without a real token"),
    (lambda: PackedRollouts.from_padded(IDS, MASK, response_mask=MASK + 1), "that attention_mask hides"),
    (lambda: grpo(logp=torch.zeros(26)), r"logp is \[26\], wanted \[5\], one per slot"),
    (
        lambda: grpo(advantages=torch.ones(3)),
        r"advantages is \[3\], wanted \[5\], one per slot, or one per row",
    ),
    (lambda: grpo(kind="x"), "kind.*x.*wanted one of grpo"),
    (lambda: grpo(kind="dr_grpo"), "got no max_tokens"),
    (lambda: grpo(beta=0.1), "beta is 0.1 and reference_logp absent"),
    (lambda: grpo(clip=0.0), "clip=0.0; wanted a finite number above 0.0"),
    (lambda: grpo(scale="1"), "scale is a str.*wanted a number"),
    (lambda: ppo(dual_clip=1.0), "dual_clip=1.0"),
    (lambda: gspo(advantages=FIVE), r"advantages is \[5\], wanted \[2\], one per row"),
    (lambda: gspo(weights=FIVE), r"weights is \[5\], wanted \[2\], one per row"),
    (lambda: policy.group_advantages(FIVE, 2), r"rewards is torch.float32 \[5\] with group_size=2"),
    (lambda: policy.group_advantages(ONE, 1), "group of at least 2"),
    (lambda: dpo(reference_rejected=FIVE), r"'reference_rejected': \[5\]}, wanted one number per response"),
    (lambda: dpo(weights=FIVE), r"'weights': \[5\]"),
    (lambda: dpo(kind="dpo"), "kind.*dpo.*wanted one of sigmoid, hinge"),
    (lambda: dpo(beta=0.0), "beta=0.0; wanted a finite number above 0.0"),
    (lambda: dpo(kind="ipo"), "kind='ipo' averages over tokens, wanted chosen_tokens"),
    (lambda: dpo(kind="aot", scale=0.5), "sorts the pairs of a step"),
    (lambda: dpo(kind="hinge", label_smoothing=0.1), "label_smoothing is 0.1 with kind='hinge'"),
    (lambda: dpo(kind="exo_pair"), "with kind='exo_pair', wanted below 0.5, and above 0"),
    (lambda: preference.kto_loss(ONE, ONE, ONE), r"desirable is torch.float32 \[2\], wanted bool"),
    (lambda: preference.kto_loss(ONE, ONE, ONE > 0, desirable_weight=-1), "desirable_weight=-1; wanted a"),
    (lambda: preference.kto_loss(ONE, ONE, ONE > 0, divergence=ONE), r"divergence is \[2\], wanted one"),
    (lambda: preference.reward_pair_loss(ONE.long(), ONE), "chosen is torch.int64, wanted floats"),
]


@pytest.mark.parametrize(("call", "words"), CASES)
def test_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def test_a_head_that_predicts_further_tokens_or_balances_experts_says_what_it_lacks() -> None:
    model: Any = build("Granite")
    inner = model.forward

    def forward(**kwargs: Any) -> Any:
        outputs = inner(**kwargs, output_hidden_states=True)
        model.lm_head(outputs.hidden_states[-1])
        outputs.aux_loss = torch.tensor(1.0)
        return outputs

    model.forward = forward
    with pytest.raises(ValueError, match="do not apply to predictions beyond the next"):
        causal_lm_loss(model, BATCH, reduction="sequences")
    with pytest.raises(
        ValueError, match="an auxiliary loss, but neither it nor its config has router_aux_loss_coef"
    ):
        causal_lm_loss(model, BATCH)


def test_a_head_cut_in_other_ways() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with pretended_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        line = init_device_mesh("cpu", (4,))
        cases: list[tuple[Any, Any, Any, str]] = [
            (
                mesh,
                [Shard(0), Shard(0)],
                None,
                "head's weight is placed as .*, wanted rows of the vocabulary",
            ),
            (mesh, [Replicate(), Shard(1)], None, "head's weight is placed as"),
            (mesh, [Replicate(), Shard(0)], dist.group.WORLD, "and tp_group another group, .*Leave tp_group"),
            (line, [Shard(0)], None, "unknown whether the ranks hold the same tokens.*fully_shard"),
        ]
        for on, placements, group, words in cases:
            weight = distribute_tensor(torch.zeros(8, 16), on, placements)
            with pytest.raises(ValueError, match=words):
                logprobs(weight=weight, tp_group=group)
