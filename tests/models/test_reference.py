"""check_packing(reference=): a port is compared with what it was ported from, and each mistake is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_thd import THDBatch, check_packing, varlen_attention
from lightning_thd.models.probe_report import PackingLeakError

VOCAB = 40
SIZE = 16
HEADS = 4
GROUPS = 2
HEAD = 4
WINDOW = 20
CAP = 2.0
SCALE = 0.7


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate ``[..., T, D]`` by its positions ``[T]``."""
    angles = positions[:, None] * 0.3 ** torch.arange(HEAD // 2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Attention(nn.Module):
    """Unported: dense scores of one row ``[1, L, size]`` with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(SIZE, HEADS * HEAD)
        self.kv = nn.Linear(SIZE, 2 * GROUPS * HEAD)
        self.out = nn.Linear(HEADS * HEAD, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        place = torch.arange(length)
        q = rotated(self.q(x).view(1, length, HEADS, HEAD).transpose(1, 2), place)
        k, v = self.kv(x).view(1, length, 2, GROUPS, HEAD).unbind(2)
        k = rotated(k.transpose(1, 2), place).repeat_interleave(HEADS // GROUPS, 1)
        v = v.transpose(1, 2).repeat_interleave(HEADS // GROUPS, 1)
        scores = CAP * torch.tanh(q @ k.mT * SCALE / CAP)
        far = place[:, None] - place[None]
        scores = scores.masked_fill((far < 0) | (far >= WINDOW), -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class PortedAttention(Attention):
    """The same on a pack, with one mistake or none."""

    mistake = ""

    def forward(self, x: Tensor, batch: THDBatch) -> Tensor:
        wrong = self.mistake
        place = torch.arange(len(x)) if wrong == "positions" else batch.position_ids
        q = self.q(x).unflatten(-1, (HEADS, HEAD))
        k, v = self.kv(x).unflatten(-1, (2, GROUPS, HEAD)).unbind(1)
        if wrong == "heads":  # neighbouring query heads share keys, not distant ones
            q = q.unflatten(1, (GROUPS, -1)).transpose(1, 2).flatten(1, 2)

        if wrong != "rope":
            q = rotated(q.transpose(0, 1), place).transpose(0, 1)
            k = rotated(k.transpose(0, 1), place).transpose(0, 1)

        options: dict[str, Any] = {"scale": SCALE, "softcap": CAP, "window": WINDOW}
        if wrong in options:
            options[wrong] = None
        if wrong == "window one too small":
            options["window"] = WINDOW - 1
        cu = batch.cu_seqlens_padded
        longest = batch.max_seqlen
        if wrong == "both ways":
            options |= {"causal": False, "window": (WINDOW - 1, WINDOW - 1)}
        out = varlen_attention(q, k, v, cu, cu, longest, longest, **options)
        return self.out(out.flatten(1))


class Block(nn.Module):
    attention: type[nn.Module] = Attention

    def __init__(self) -> None:
        super().__init__()
        self.window = WINDOW  # by which check_packing chooses a sequence long enough
        self.norm1 = nn.RMSNorm(SIZE)
        self.norm2 = nn.RMSNorm(SIZE)
        self.attn = self.attention()
        self.mlp = nn.Sequential(nn.Linear(SIZE, 24), nn.GELU(), nn.Linear(24, SIZE))

    def forward(self, x: Tensor, *batch: THDBatch) -> Tensor:
        x = x + self.attn(self.norm1(x), *batch)
        return x + self.mlp(self.norm2(x))


class PortedBlock(Block):
    attention = PortedAttention
    mistake = ""

    def forward(self, x: Tensor, *batch: THDBatch) -> Tensor:
        x = x + self.attn(self.norm1(x), *batch)
        residual = 0.0 if self.mistake == "residual" else x
        return residual + self.mlp(self.norm2(x))


class Original(nn.Module):
    """The unported model of one row ``[1, L]``."""

    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCAB, SIZE)
        self.layers = nn.ModuleList([self.block() for _ in range(2)])
        self.norm = nn.RMSNorm(SIZE)
        self.head = nn.Linear(SIZE, VOCAB, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) / 3


class Port(Original):
    """The ported model, with one mistake or none."""

    block = PortedBlock

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.mistake = mistake
        for module in self.modules():
            if isinstance(module, PortedAttention | PortedBlock):
                module.mistake = mistake
        if mistake == "norm":
            self.norm.eps = 0.1

    def forward(self, batch: THDBatch) -> Tensor:
        x = self.tokens(batch.input_ids)
        for layer in self.layers:
            x = layer(x, batch)
        x = self.norm(x)
        if self.mistake == "detached":
            x = x.detach() + 0.0 * x
        logits = F.linear(x, self.head.weight)
        return logits if self.mistake == "logit scale" else logits / 3


def test_a_right_port_passes_with_a_module_and_with_a_function() -> None:
    port = Port()
    original = Original()
    nn.init.normal_(original.head.weight)  # the port's weights are used, whatever those of the original are
    report = check_packing(port, VOCAB, reference=original)
    assert report.ok
    assert max(report.lengths) > WINDOW
    assert report.port_error is not None
    assert report.port_gradient is not None
    same = Original()
    assert check_packing(port, VOCAB, reference=lambda ids: same(ids), lengths=(30, 4)).ok


MISTAKES = {
    "scale": "layers.0.attn",
    "softcap": "layers.0.attn",
    "window": "layers.0.attn",
    "window one too small": "layers.0.attn",
    "heads": "layers.0.attn",
    "rope": "layers.0.attn",
    "both ways": "layers.0.attn",
    "residual": "layers.0 ",
    "norm": "norm ",
    "logit scale": "the model itself",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_of_ten_mistakes_is_named(mistake: str) -> None:
    with pytest.raises(PackingLeakError, match="differs from the reference") as caught:
        check_packing(Port(mistake), VOCAB, reference=Original())
    assert str(caught.value.report.module).startswith(MISTAKES[mistake])
    assert "positions, norms and what is added up" in str(caught.value)


def test_a_port_of_frozen_weights_compares_logits() -> None:
    check_packing(Port().requires_grad_(False), VOCAB, reference=Original())
    with pytest.raises(PackingLeakError, match="differs from the reference"):
        check_packing(Port("rope").requires_grad_(False), VOCAB, reference=Original())


def test_gradients_that_stop_are_found_where_logits_agree() -> None:
    with pytest.raises(PackingLeakError, match="differs from the reference"):
        check_packing(Port("detached"), VOCAB, reference=Original())


def test_a_port_of_other_names_runs_beside_its_own_weights() -> None:
    class Renamed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids)

    report = check_packing(Port(), VOCAB, reference=Renamed(Original()))
    assert report.ok
    assert any("weights are its own" in what for what in report.skipped)


def test_a_model_that_refuses_a_sequence_of_one_token_is_checked_without_it() -> None:
    class Longer(Port):
        def forward(self, batch: THDBatch) -> Tensor:
            assert min(batch.lengths) > 1
            return super().forward(batch)

    assert 1 not in check_packing(Longer(), VOCAB).lengths


def test_what_is_no_reference_is_refused() -> None:
    with pytest.raises(TypeError, match="wanted the module that was ported"):
        check_packing(Port(), VOCAB, reference=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Return one row for each token"):
        check_packing(Port(), VOCAB, reference=lambda ids: torch.zeros(3, 2))
