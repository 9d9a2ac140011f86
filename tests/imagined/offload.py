"""Layer inputs in CPU memory on an imagined GPU: the same loss and gradients, and less memory; a script."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.models import prepare
from tests.imagined.gpu import data, imagined_gpu
from tests.tiny import largest_error, sequences

LAYERS = 8
HIDDEN = 64
BATCH = THDBatch.collate(sequences(40, labels=True))


def model(*, offload: bool) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=64,
    )
    made: Any = LlamaForCausalLM._from_config(config, attn_implementation="thd").cuda().train()
    made.gradient_checkpointing_enable({"use_reentrant": False})
    if offload:
        prepare(made, offload=True)
    return made


def after_forward(made: Any, batch: THDBatch) -> tuple[torch.Tensor, int]:
    """Return the loss, and what the device holds for the backward pass."""
    before = torch.cuda.memory_allocated()
    loss = causal_lm_loss(made, batch)
    return loss, torch.cuda.memory_allocated() - before


def main() -> None:
    with imagined_gpu():
        compare()


def compare() -> None:
    """Compare two steps with and without offload."""
    batch = BATCH.to("cuda")
    slots = batch.input_ids.shape[-1]
    results = []

    for offload in (False, True):
        made = model(offload=offload)
        for _ in range(2):  # the second step meets the inputs of the first
            made.zero_grad()
            loss, held = after_forward(made, batch)
            loss.backward()
        results.append((data(loss), {n: data(p.grad) for n, p in made.named_parameters()}, held))

    (expected, gradients, most), (loss, found, least) = results
    assert torch.equal(loss, expected), (loss, expected)
    assert largest_error(found, gradients) == 0.0

    inputs = LAYERS * slots * HIDDEN * 4
    # The embedding's output, the input of the first layer, has another holder.
    assert 0.98 * inputs * (LAYERS - 1) / LAYERS < most - least <= inputs, (most, least, inputs)

    sys.stdout.write(f"{most:,} bytes after a forward pass, {least:,} with offload: equal\n")


if __name__ == "__main__":
    main()
