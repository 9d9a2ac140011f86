"""One norm over gradients on several meshes; hooks that take the norm of one stage are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_thd.strategies.norms import clip_by_norm, clip_by_value, grad_norm, meshes
from tests.ranks import run_ranks


def whole() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 6), (12,), (4, 4), (3,), (8, 2)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def parameters() -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    places = [(mesh, [Shard(0), Shard(1)]), (mesh["a"], [Shard(0)]), (mesh, [Shard(0), Replicate()])]
    made = []
    for i, gradient in enumerate(whole()):
        grad = gradient
        if i < len(places):
            grad = distribute_tensor(gradient, places[i][0], places[i][1])
        grad = grad.float() if i == 4 else grad
        parameter = nn.Parameter(torch.zeros_like(grad))
        parameter.grad = grad
        made.append(parameter)
    return [*made, nn.Parameter(torch.zeros(2))]  # the last has no gradient


def clipped(max_norm: float) -> tuple[float, list[torch.Tensor]]:
    trained = parameters()
    assert len(meshes(trained)) == 3
    norm = clip_by_norm(trained, max_norm)
    grads = [p.grad for p in trained if p.grad is not None]
    return float(norm), [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_norm_over_meshes(max_norm: float) -> None:
    expected = [nn.Parameter(torch.zeros_like(g)) for g in whole()]
    for parameter, grad in zip(expected, whole(), strict=True):
        parameter.grad = grad
    norm = float(nn.utils.clip_grad_norm_(expected, max_norm))
    for actual, grads in run_ranks(clipped, 4, max_norm):
        assert actual == pytest.approx(norm, rel=1e-7)  # one of the gradients is fp32
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a.double(), b.grad, rtol=1e-6, atol=1e-7)


def test_nothing_to_clip_and_values() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    assert float(clip_by_norm([parameter], 1.0)) == 0.0
    assert clip_by_norm([], 1.0, device=torch.device("meta")).is_meta  # NCCL refuses CPU tensors
    parameter.grad = torch.tensor([-3.0, 0.1, 3.0])
    clip_by_value([parameter], 0.5)
    assert parameter.grad.tolist() == pytest.approx([-0.5, 0.1, 0.5])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_low_precision_are_not_rounded_to_it(dtype: torch.dtype) -> None:
    module = nn.ModuleList([nn.Linear(50, 60, dtype=dtype) for _ in range(2)])
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter) * 3e3  # a norm of 2e5, beyond fp16
    norm = torch.cat([p.grad.double().flatten() for p in module.parameters() if p.grad is not None]).norm()
    assert float(grad_norm(module, 2)["grad_2.0_norm_total"]) == pytest.approx(float(norm), rel=1e-5)
    clip_by_norm(module.parameters(), 5e-3)  # by a factor of 2e-8, which fp16 would round to 0
    assert float(grad_norm(module, 2)["grad_2.0_norm_total"]) == pytest.approx(5e-3, rel=1e-2)
