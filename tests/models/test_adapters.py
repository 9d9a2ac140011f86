"""Adapters of PEFT on packs: those of single tokens are exact, others are refused by name."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_thd import THDBatch, causal_lm_loss
from tests.tiny import nll, sequences, tiny_llama

peft = pytest.importorskip("peft")
# What PEFT makes transformers say.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
SAMPLES = [sample for sample in sequences(7, labels=True, seed=3) if len(sample["input_ids"]) > 1]
INVOCATION = [int(SAMPLES[0]["input_ids"][2])]
RANKS = {"target_modules": ["q_proj"], "total_step": 10, "tinit": 1, "tfinal": 2}

EXACT: dict[str, dict[str, Any]] = {
    "LoraConfig": {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "init_lora_weights": False},
    "IA3Config": {
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
        "init_ia3_weights": False,
    },
    "AdaLoraConfig": {**RANKS, "target_modules": ["q_proj", "lm_head"], "orth_reg_weight": 0.0},
    "LoKrConfig": {"target_modules": ["lm_head"]},
    "VeraConfig": {"target_modules": ["lm_head"], "r": 4},
}
QUERIES = {"target_modules": ["q_proj"]}
VIRTUAL = {"num_virtual_tokens": 4}
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("LoraConfig", {**QUERIES, "alora_invocation_tokens": INVOCATION}, "has alora_invocation_tokens"),
    ("LoraConfig", {**QUERIES, "velora_config": {"num_groups": 4}}, "'default' has velora_config"),
    ("PromptTuningConfig", VIRTUAL, r"'default' \(PROMPT_TUNING\) puts virtual tokens before every row"),
    ("PrefixTuningConfig", VIRTUAL, r"\(PREFIX_TUNING\) puts virtual tokens before every"),
    ("AdaLoraConfig", RANKS, r"\(ADALORA\) adds a penalty .* \(orth_reg_weight=0.5\)"),
    ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 1}, "never called .* adaption prompts"),
    ("LilyConfig", {**QUERIES, "r": 4}, r"\(LILY\) is not known to change each token"),
]


def lacks(kind: str, options: dict[str, Any]) -> bool:
    """Return whether the installed PEFT has no such config, or no such option of it: aLoRA, VeLoRA, LILY."""
    config = getattr(peft, kind, None)
    return config is None or not options.keys() <= inspect.signature(config).parameters.keys()


REFUSED = [
    pytest.param(
        *row,
        marks=pytest.mark.skipif(
            lacks(row[0], row[1]), reason=f"PEFT {peft.__version__} has no {row[0]} with {', '.join(row[1])}"
        ),
    )
    for row in ROWS
]


def adapted(kind: str, options: dict[str, Any]) -> nn.Module:
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    model: nn.Module = peft.get_peft_model(tiny_llama(), config).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", EXACT)
def test_adapters_of_single_tokens_are_exact(kind: str) -> None:
    model = adapted(kind, EXACT[kind])
    results = [nll(model, sample) for sample in SAMPLES]
    stock = torch.stack([total for total, _ in results]).sum() / sum(count for _, count in results)
    expected = gradients(model, stock)
    head = "lm_head" in EXACT[kind]["target_modules"]
    with pytest.warns(UserWarning, match="logits .* whole") if head else contextlib.nullcontext():
        loss = causal_lm_loss(model, THDBatch.collate(SAMPLES))
    assert float(loss.detach()) == pytest.approx(float(stock.detach()), rel=1e-12)
    actual = gradients(model, loss)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_adapters_that_look_at_rows_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    model = adapted(kind, options)
    batch = THDBatch.collate(SAMPLES)
    with pytest.raises(ValueError, match=message):
        causal_lm_loss(model, batch)
    if kind in ("LoraConfig", "LilyConfig"):
        with pytest.raises(ValueError, match=message):
            model(**batch.hf_kwargs())


# PEFT adds AdaLora's penalty to the loss of a disabled adapter too, and adaption prompts replace layers.
DISABLED = [row for row in REFUSED if row.values[0] not in ("AdaLoraConfig", "AdaptionPromptConfig")]


@pytest.mark.parametrize(("kind", "options", "message"), DISABLED)
def test_a_disabled_adapter_takes_no_part(kind: str, options: dict[str, Any], message: str) -> None:
    """DPO's reference is a policy with its adapter disabled."""
    model: Any = adapted(kind, options)
    batch = THDBatch.collate(SAMPLES)
    expected = causal_lm_loss(tiny_llama(), batch).detach()
    with model.disable_adapter():
        torch.testing.assert_close(causal_lm_loss(model, batch).detach(), expected, rtol=1e-12, atol=0)
        logits = model(**batch.hf_kwargs()).logits
    torch.testing.assert_close(logits, tiny_llama()(**batch.hf_kwargs()).logits, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match=message):
        causal_lm_loss(model, batch)


@pytest.mark.parametrize(("kind", "options", "message"), [REFUSED[0], REFUSED[1], REFUSED[6]])
def test_an_inactive_adapter_takes_no_part(kind: str, options: dict[str, Any], message: str) -> None:
    """Another adapter of the same kind is active; the model equals one that has only that."""
    plain = {name: value for name, value in options.items() if name in ("target_modules", "r")}
    active = "LoraConfig" if kind == "LoraConfig" else "LilyConfig"
    model: Any = adapted(kind, options)
    model.add_adapter("other", getattr(peft, active)(task_type="CAUSAL_LM", **plain))
    batch = THDBatch.collate(SAMPLES)

    with pytest.raises(ValueError, match=message):
        causal_lm_loss(model, batch)
    model.set_adapter("other")

    if kind == "LilyConfig":  # the active one is no better
        with pytest.raises(ValueError, match=r"'other' \(LILY\)"):
            causal_lm_loss(model, batch)
        return

    model.double()
    expected = [nll(model, sample) for sample in SAMPLES]
    mean = torch.stack([total for total, _ in expected]).sum() / sum(count for _, count in expected)

    torch.testing.assert_close(causal_lm_loss(model, batch), mean, rtol=1e-12, atol=0)
