from __future__ import annotations

from typing import Any

import pytest
import torch
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
