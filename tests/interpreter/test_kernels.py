"""Fused kernels of other packages, run for real on packs, against oracles that go a step at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, on masked lanes that hold anything
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"),  # the interpreter's own numpy
]
LENGTHS = [9, 1, 21, 16]
T = sum(LENGTHS)
# fp32 throughout; chunked forms add in another order than a step at a time.
TOLERANCE = 2e-5
Report = Callable[[str, float], None]


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Report:
    """Check an error against the oracle, and have ``make test-kernels`` list it at the end."""

    def keep(what: str, error: float) -> None:
        record_property(what, error)
        assert error < TOLERANCE

    return keep


def offsets() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0)


def pieces(x: Tensor) -> list[Tensor]:
    return list(x.split(LENGTHS, dim=1))


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest relative error of a list of tensors, by norms."""
    assert len(found) == len(wanted) > 0
    errors = [
        float((a.detach().double() - b.detach()).norm() / b.detach().norm().clamp_min(1e-12))
        for a, b in zip(found, wanted, strict=True)
    ]
    return max(errors)


def compare(
    kernel: Callable[..., Tensor], oracle: Callable[..., Tensor], leaves: list[Tensor]
) -> tuple[float, float]:
    """Errors of the result and of all gradients against an oracle in fp64."""
    output = kernel(*leaves)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
    got = torch.autograd.grad(output, leaves, grad)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = oracle(*wide)
    want = torch.autograd.grad(expected, wide, grad.double())
    return worst([output], [expected]), worst(list(got), list(want))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule a step at a time on ``[1, n, H, D]``, from an empty state."""
    q = F.normalize(q, dim=-1, eps=1e-6)
    k = F.normalize(k, dim=-1, eps=1e-6)
    state = v.new_zeros(v.shape[2], k.shape[3], v.shape[3])
    rows = []
    for t in range(v.shape[1]):
        state = state * g[0, t].exp()[:, None, None]
        seen = torch.einsum("hd,hde->he", k[0, t], state)
        state = state + torch.einsum("hd,he->hde", k[0, t], (v[0, t] - seen) * beta[0, t][:, None])
        rows.append(torch.einsum("hd,hde->he", q[0, t] * q.shape[3] ** -0.5, state))
    return torch.stack(rows)[None]


def delta_leaves() -> list[Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, T, 2, 16) for _ in range(3))
    g = F.logsigmoid(torch.randn(1, T, 2))
    beta = torch.rand(1, T, 2)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def test_flas_gated_delta_rule_in_chunks(report: Report) -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        cu = offsets()
        out, _ = chunk_gated_delta_rule(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu, cu_seqlens_cpu=cu.clone()
        )
        return out

    def oracle(*leaves: Tensor) -> Tensor:
        parts = zip(*map(pieces, leaves), strict=True)
        return torch.cat([delta_rule(*part) for part in parts], dim=1)

    out, gradients = compare(kernel, oracle, delta_leaves())
    report("fla-core 0.6.0 chunk_gated_delta_rule forward", out)
    report("fla-core 0.6.0 chunk_gated_delta_rule backward", gradients)


def convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU of ``[1, n, D]``, zeros before the first."""
    padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=x.shape[2])).transpose(1, 2)


def test_flas_causal_convolution(report: Report) -> None:
    from fla.modules.causal_conv1d.ops import causal_conv1d

    def kernel(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        made = causal_conv1d(x, weight, bias, activation="silu", backend="triton", cu_seqlens=offsets())
        return made[0] if isinstance(made, tuple) else made

    def oracle(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.cat([convolution(part, weight, bias) for part in pieces(x)], dim=1)

    torch.manual_seed(1)
    leaves = [torch.randn(s, requires_grad=True) for s in ((1, T, 8), (8, 4), (8,))]
    out, gradients = compare(kernel, oracle, leaves)
    report("fla-core 0.6.0 causal_conv1d (Triton) forward", out)
    report("fla-core 0.6.0 causal_conv1d (Triton) backward", gradients)


def state_space(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba-2's recurrence a step at a time on ``[1, n, H, P]``, from an empty state."""
    state = x.new_zeros(x.shape[2], x.shape[3], b.shape[3])
    rows = []
    for t in range(x.shape[1]):
        state = state * (dt[0, t] * a).exp()[:, None, None]
        state = state + torch.einsum("h,hp,n->hpn", dt[0, t], x[0, t], b[0, t, 0])
        rows.append(torch.einsum("hpn,n->hp", state, c[0, t, 0]))
    return torch.stack(rows)[None]


def test_mambas_chunk_scan(report: Report) -> None:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    seq_idx = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).int()[None]

    def kernel(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size=16, seq_idx=seq_idx)

    def oracle(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        parts = zip(*(pieces(y) for y in (x, dt, b, c)), strict=True)
        return torch.cat([state_space(x_, dt_, a, b_, c_) for x_, dt_, b_, c_ in parts], dim=1)

    torch.manual_seed(2)
    x = torch.randn(1, T, 2, 16)
    b = torch.randn(1, T, 1, 16)
    c = torch.randn(1, T, 1, 16)
    leaves = [y.requires_grad_() for y in (x, torch.rand(1, T, 2), -torch.rand(2), b, c)]
    out, gradients = compare(kernel, oracle, leaves)
    report("mamba-ssm 2.3.2.post1 mamba_chunk_scan_combined forward", out)
    report("mamba-ssm 2.3.2.post1 mamba_chunk_scan_combined backward", gradients)
