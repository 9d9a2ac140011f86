from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from lightning_thd.flops import FlopsModel, SeqStats


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def test_counts_a_step_and_scales_it_with_the_slots(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    inputs = torch.randn(10, 8, requires_grad=True)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        model = FlopsModel.from_module(
            net, lambda: net(inputs).sum().backward(), stats=SeqStats.from_lengths([10])
        )
    assert "FLOPs of Net are those of one step under torch's FlopCounterMode" in caplog.text
    per_token = 6 * 2 * 8 * 24
    assert model.training_flops(SeqStats.from_lengths([10])).model == 10 * per_token
    padded = model.training_flops(SeqStats.from_lengths([20], slots=30))
    assert padded.model == 30 * per_token


def test_fused_attention_is_scaled_with_the_squares_of_the_sequences() -> None:
    heads, size, total = 2, 16, 32

    def step() -> None:
        qkv = [torch.randn(1, heads, total, size, device="meta", requires_grad=True) for _ in range(3)]
        weight = torch.randn(size, size, device="meta", requires_grad=True)
        flash = torch.ops.aten._scaled_dot_product_flash_attention(*qkv, is_causal=True)[0]
        (flash @ weight).sum()

    stats = SeqStats.from_cu_seqlens(None, shape=(1, total))
    model = FlopsModel.from_module(nn.Identity(), step, stats=stats)
    whole = model.training_flops(stats).attention
    halves = model.training_flops(SeqStats.from_lengths([16, 16])).attention
    # what torch counts is the full square; the default convention halves it
    assert whole == 2 * heads * 2 * size * total**2 // 2
    assert 2 * halves == whole


def test_nothing_to_count_says_so() -> None:
    with pytest.raises(ValueError, match="torch counted 0 FLOPs of matmuls in Identity on 4 slots"):
        FlopsModel.from_module(nn.Identity(), lambda: None, stats=SeqStats.from_lengths([4]))
