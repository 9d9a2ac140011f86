from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_thd._imports import available
from lightning_thd.loss import fused_linear_cross_entropy
from tests.loss.oracles import Case

needs_torch = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs torch 2.13")


@needs_torch
@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.1])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_torchs_own_is_equal(ignored: float, reduction: Any) -> None:
    leaves, targets = Case(dtype=torch.float32, bias=True, ignored=ignored).tensors()
    found = []
    for backend in ("auto", "torch"):
        loss = fused_linear_cross_entropy(
            leaves[0], leaves[1], targets, bias=leaves[2], reduction=reduction,
            backend=backend,  # type: ignore[arg-type]
        )  # fmt: skip
        found.append((loss, *torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        ("torch", {"z_loss": 0.1, "softcap": 3.0}, "backend='torch' does not honour softcap, z_loss"),
        ("torch", {"temperature": 2.0}, "temperature or logit_scale"),
        ("liger", {"valid_vocab_size": 90}, "backend='liger' does not honour valid_vocab_size"),
        ("torch", {"label_smoothing": 0.1}, "does not honour label_smoothing"),
        ("cce", {"label_smoothing": 0.1}, "backend='cce' does not honour label_smoothing"),
        ("cce", {"token_weights": torch.arange(1.0, 5.0)}, "does not honour token_weights"),
        ("torch", {"low_rank": (torch.zeros(4, 2), torch.zeros(101, 2))}, "does not honour low_rank"),
    ],
)
def test_a_backend_refuses_what_it_cannot_honour(backend: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_linear_cross_entropy(
            torch.randn(4, 16), torch.randn(101, 16), torch.arange(4), backend=backend, **changes
        )


@pytest.mark.parametrize(("backend", "package"), [("liger", "liger_kernel"), ("cce", "cut_cross_entropy")])
def test_an_absent_package_is_named(backend: Any, package: str) -> None:
    if available(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(ModuleNotFoundError, match=rf"backend='{backend}' needs the package '{package}"):
        fused_linear_cross_entropy(torch.randn(4, 16), torch.randn(101, 16), torch.arange(4), backend=backend)


def summed(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, cap: float | None) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return F.cross_entropy(logits, targets, reduction="sum")


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """The parameters of liger-kernel's, of August 2026."""

    def __init__(
        self, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
        softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
        return_token_accuracy=False, return_predicted_tokens=False,
    ):  # fmt: skip
        super().__init__()
        assert (reduction, accum_dtype, return_z_loss, use_token_scaling) == (
            "sum",
            torch.float32,
            False,
            False,
        )
        assert (ce_weight, lse_square_scale, label_smoothing) == (None, 0.0, 0.0)
        self.softcap = softcap

    def forward(self, lin_weight, _input, target, bias=None):
        return summed(_input, lin_weight, target, bias, self.softcap)


def linear_cross_entropy(
    e, c, targets, bias=None, ignore_index=-100, softcap=None, reduction="mean", shift=0, return_lse=False,
    filter_eps="auto", accum_e_fp32=False, accum_c_fp32=False, filter_e_grad=True, filter_c_grad=True,
    impl="cce", vocab_parallel_options=None,
):  # fmt: skip
    """Stand for cut-cross-entropy's, of its main branch; sums in bf16 and dropped gradients are not equal."""
    assert (reduction, shift, return_lse, filter_eps) == ("sum", 0, False, None)
    assert accum_e_fp32
    assert accum_c_fp32
    return summed(e, c, targets, bias, softcap)


def older_linear_cross_entropy(
    e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, filter_eps="auto",
    use_kahan=False, impl="cce",
):  # fmt: skip
    assert use_kahan
    return linear_cross_entropy(
        e, c, targets, None, ignore_index, softcap, reduction, 0, False, filter_eps, True, True
    )


@pytest.mark.parametrize(
    ("backend", "package", "double", "with_bias"),
    [
        (
            "liger",
            "liger_kernel.transformers.fused_linear_cross_entropy",
            LigerFusedLinearCrossEntropyLoss,
            1,
        ),
        ("cce", "cut_cross_entropy", linear_cross_entropy, 1),
        ("cce", "cut_cross_entropy", older_linear_cross_entropy, 0),
    ],
)
def test_other_packages_are_called_as_they_take_it(
    monkeypatch: pytest.MonkeyPatch, backend: Any, package: str, double: Any, with_bias: int
) -> None:
    module = types.ModuleType(package)
    setattr(
        module, {"liger": "LigerFusedLinearCrossEntropyLoss"}.get(backend, "linear_cross_entropy"), double
    )
    monkeypatch.setattr("lightning_thd.loss.backends.require", lambda name, **_: {package: module}[name])
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8, requires_grad=True) for n in (6, 11))
    bias = torch.randn(11, requires_grad=True) if with_bias else None
    targets = torch.tensor([3, -100, 0, 10, -100, 7])
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    found = []
    for name in ("auto", backend):
        loss = fused_linear_cross_entropy(
            hidden, weight, targets, bias=bias, softcap=2.0, reduction="mean", backend=name
        )
        found.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("backend", "package"), [("liger", "liger_kernel"), ("cce", "cut_cross_entropy")])
def test_triton_backends_are_equal(backend: Any, package: str) -> None:
    pytest.importorskip(package)
    torch.manual_seed(0)
    hidden = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(4096, 256, device="cuda") * 0.1).bfloat16().requires_grad_()
    targets = torch.randint(0, 4096, (512,), device="cuda")
    found = []
    for name in ("auto", backend):
        loss = fused_linear_cross_entropy(
            hidden, weight, targets, softcap=30.0, reduction="mean", backend=name
        )
        found.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    torch.testing.assert_close(found[0], found[1], rtol=3e-2, atol=1e-4)
