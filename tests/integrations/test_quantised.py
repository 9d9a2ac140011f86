"""Adapters on a quantised base (QLoRA): a pack gives the loss and gradients of its sequences alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_thd import THDBatch, causal_lm_loss, check_packing
from tests.tiny import sequences

peft = pytest.importorskip("peft")


def int8() -> Any:
    from transformers import TorchAoConfig

    quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(quantization.Int8WeightOnlyConfig())


def nf4() -> Any:
    from transformers import BitsAndBytesConfig

    pytest.importorskip("bitsandbytes", reason="bitsandbytes is no part of the dev extra")
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


@pytest.mark.filterwarnings("ignore")  # of the quantising packages
@pytest.mark.parametrize("quantization", [int8, nf4])
def test_adapters_on_a_quantised_base_learn_the_same_from_packs(quantization: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = quantization()
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads)).save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=config,
        attn_implementation="thd",
        device_map="cpu",
        dtype=torch.float32,
    )
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(base, adapters).train()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if quantization is int8:  # bitsandbytes may evaluate in bf16 where it trains in fp32
        assert check_packing(model).ok

    def gradients() -> dict[str, torch.Tensor]:
        grads = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
        model.zero_grad()
        return grads

    samples = [sample for sample in sequences(12) if len(sample["input_ids"]) > 1]
    targets = [len(sample["input_ids"]) - 1 for sample in samples]
    loss = causal_lm_loss(model, THDBatch.collate(samples))
    loss.backward()
    packed = gradients()
    total = 0.0
    for sample, count in zip(samples, targets, strict=True):
        alone = causal_lm_loss(model, THDBatch.collate([sample])) * count / sum(targets)
        alone.backward()
        total += float(alone.detach())
    assert float(loss.detach()) == pytest.approx(total, rel=1e-5)
    for name, expected in gradients().items():
        assert float((packed[name] - expected).abs().max()) < 1e-4 * float(expected.abs().max()), name
    assert len(packed) == len(weights)
