from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_thd.loss import fused_linear_logprobs
from lightning_thd.loss.tiles import logprobs
from lightning_thd.loss.tiles.products import cpu_multiplies_bf16

TOKENS, WIDTH, COLUMNS = 200, 128, 6000

pytestmark = pytest.mark.skipif(
    not cpu_multiplies_bf16(), reason="this CPU has no bf16 instructions: tiles are widened"
)


def operands(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets whose predictions are flat, peaked, or nearly certain."""
    torch.manual_seed(0)
    size = {"flat": 1.0, "peaked": 8.0}.get(kind, 2.0)
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(COLUMNS, WIDTH) * (size / WIDTH**0.5)
    targets = torch.randint(0, COLUMNS, (TOKENS,))
    if kind == "certain":
        hidden = weight[targets] * (40.0 / weight[targets].square().sum(1, keepdim=True))
    if kind == "offset":
        hidden[:, 0], weight[:, 0] = 20.0, 20.0
    if kind == "alike":
        weight[COLUMNS // 4 :] = weight[0]
    return hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), targets


def values(log_p: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("kind", ["flat", "peaked", "certain", "offset", "alike"])
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probabilities_are_exact_to_a_few_thousandths(kind: str, entropy: bool) -> None:
    hidden, weight, targets = operands(kind)
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = values((leaves[0] @ leaves[1].T).log_softmax(-1), targets)
    naive = values(F.linear(hidden, weight).float().log_softmax(-1), targets)
    ours = fused_linear_logprobs(hidden, weight, targets, entropy=entropy)
    assert (ours.logp - exact[0]).abs().max() < 4e-3
    assert (ours.logp <= 0.0).all()
    pairs = [(ours.logp, naive[0], exact[0])]
    if entropy:
        assert (ours.entropy - exact[1]).abs().max() < 1.6e-2
        pairs.append((ours.entropy, naive[1], exact[1]))
    for mine, theirs, true in pairs:
        wanted = torch.autograd.grad(true.sum(), leaves, retain_graph=True)
        found = torch.autograd.grad(mine.sum(), (hidden, weight), retain_graph=True)
        rough = torch.autograd.grad(theirs.sum(), (hidden, weight), retain_graph=True)
        for a, b, c in zip(found, rough, wanted, strict=True):
            small = 4e-3 * TOKENS**0.5 if kind == "certain" else 0.0  # a gradient of rounding alone
            assert (a.double() - c).norm() <= 1.2 * (b.double() - c).norm() + 4e-3 * c.norm() + small


def test_only_rows_that_need_it_are_multiplied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: dict[str, float] = {}
    choose = logprobs.rounding_shows
    for kind in ("flat", "peaked", "certain", "offset"):

        def spy(*arguments: object, kind: str = kind, **named: bool) -> Tensor:
            found = choose(*arguments, **named)  # type: ignore[arg-type]
            shares[kind] = found.float().mean().item()
            return found

        monkeypatch.setattr(logprobs, "rounding_shows", spy)
        hidden, weight, targets = operands(kind)
        fused_linear_logprobs(hidden, weight, targets, entropy=False)
    assert shares["flat"] < 0.2
    assert 0.1 < shares["peaked"] < 0.9
    assert 0.2 < shares["certain"] < 0.5  # one tile of three
    assert shares["offset"] == 1.0


def test_a_nan_is_seen() -> None:
    hidden, weight, targets = operands("flat")
    with torch.no_grad():
        hidden[3] = torch.nan
    ours = fused_linear_logprobs(hidden, weight, targets, entropy=False)
    assert ours.logp.isnan().nonzero().flatten().tolist() == [3]


def test_a_cap_is_exact_everywhere() -> None:
    hidden, weight, targets = operands("peaked")
    logits = hidden.double() @ weight.double().T
    capped = fused_linear_logprobs(hidden, weight, targets, softcap=10.0, entropy=False).logp
    exact = values((10.0 * (logits / 10.0).tanh()).log_softmax(-1), targets)[0]
    assert (capped - exact).abs().max() < 1e-3
