"""Every family whose layers can be cut gives under two tensor-parallel ranks the gradients of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX as PREFIX
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.families import build as tiny_model
from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.parallel.fsdp import layers_of
from lightning_thd.parallel.sequence import apply_sequence_parallel
from lightning_thd.parallel.tensor import apply_tensor_parallel, model_plan
from tests.models.families import build_in_double
from tests.ranks import run_ranks

# Of each kind: projections fused, norms over all heads, sinks, latent and linear attention.
SHARP = ["phi3", "olmo2", "gpt_oss", "deepseek_v3", "kimi_linear", "glm4_moe_lite", "glm4_moe"]
OTHERS = [
    *("glm4", "olmoe", "olmo_hybrid", "mixtral", "smollm3", "granite", "deepseek_v2"),
    *("granite_swa", "granitemoe_swa", "phi", "qwen3_vl_moe", "longcat_flash"),
]
# transformers' plans name styles for their attention that are not ours, or leave out norms of heads.
OTHER_PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {}),
    "glm4_moe": ("Glm4MoeForCausalLM", {"use_qk_norm": True}),
    "phi": ("PhiForCausalLM", {"qk_layernorm": True}),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", {}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {}),
    "granite_swa": ("GraniteSWAForCausalLM", {}),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", {}),
    "longcat_flash": ("LongcatFlashForCausalLM", {}),  # its router's weight is read by the block
}


def build(family: str) -> nn.Module:
    if family in OTHER_PLANS:
        model: Any = tiny_model(family, OTHER_PLANS[family][0], "thd", OTHER_PLANS[family][1])
        if model._can_set_experts_implementation():
            model.set_experts_implementation("eager")
        return model.double().train()
    return build_in_double(family)


def gradients(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    rows = [{"input_ids": torch.arange(n) * 7 % 60 + 1} for n in (7, 12, 3)]
    loss = causal_lm_loss(model, THDBatch.collate(rows))
    loss.backward()
    grads: dict[str, Any] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), {
        n.replace(PREFIX, ""): g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()
    }


def compare(families: list[str], sequence_parallel: bool) -> dict[str, tuple[float, float, int]]:
    """Return the errors of loss and gradients of every family, and how many weights were cut."""
    mesh = init_device_mesh("cpu", (2,))
    warnings.filterwarnings("ignore")
    errors = {}

    for family in families:
        loss, expected = gradients(build(family))
        model = build(family)
        apply_tensor_parallel(model, model_plan(model, 2), mesh)
        if sequence_parallel:
            apply_activation_checkpointing(model, check_fn=set(layers_of(model)).__contains__)
            apply_sequence_parallel(model, mesh.get_group())
        cut_loss, gathered = gradients(model)
        assert gathered.keys() == expected.keys()
        floor = 1e-3 * max(float(grad.norm()) for grad in expected.values())
        # A key's bias moves no softmax: its gradient is rounding, so all are measured by the largest too.
        worst = max(
            float((gathered[n] - g).norm() / max(float(g.norm()), floor)) for n, g in expected.items()
        )
        cut = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
        errors[family] = (abs(cut_loss - loss) / loss, worst, cut)

    return errors


@pytest.mark.parametrize(
    ("families", "sequence_parallel"),
    [
        (SHARP, False),
        (["kimi_linear"], True),
        pytest.param(OTHERS, False, marks=pytest.mark.slow),
        pytest.param(
            [name for name in [*SHARP, *OTHERS] if name != "qwen3_vl_moe"], True, marks=pytest.mark.slow
        ),
    ],
)
def test_gradients_equal_one_process(families: list[str], sequence_parallel: bool) -> None:
    for errors in run_ranks(compare, 2, families, sequence_parallel):
        assert list(errors) == families
        for family, (loss, worst, cut) in errors.items():
            assert loss < 1e-12, family
            assert worst < 1e-10, family
            assert cut > 4, family  # more than embedding and head


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_models_without_a_plan_are_refused(family: str) -> None:
    with pytest.raises(
        ValueError, match=r"comes without a tensor-parallel plan for its layers\. Pass a plan"
    ):
        model_plan(build(family), 2)


def refusal(family: str) -> str:
    model = build(family)
    mesh = init_device_mesh("cpu", (2,))
    try:
        apply_sequence_parallel(model, mesh.get_group())
        gradients(model)
    except ValueError as err:
        return str(err)
    return ""


def test_layers_that_flatten_hidden_states_are_refused() -> None:
    for said in run_ranks(refusal, 2, "opt"):
        assert "gathers hidden states [B, slots, H] for every block, and Linear was called" in said
