import pytest
import torch

from lightning_thd.batch import THDBatch
from lightning_thd.loss import causal_lm_loss
from lightning_thd.models import register_thd


def test_loss_and_gradients_equal_the_models_own_logits() -> None:
    register_thd()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="thd")
    batch = THDBatch.collate([{"input_ids": torch.randint(0, 96, (n,)).tolist()} for n in (5, 9, 1, 13)])
    loss = causal_lm_loss(model, batch)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = model(**batch.hf_kwargs()).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, batch.targets)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
