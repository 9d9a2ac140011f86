"""The portable kernel, run for real on a CPU, as the backend of every family of the support table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_thd import varlen_attention
from lightning_thd.attention import entry, support
from lightning_thd.models import register_thd
from tests.models import matrix
from tests.models.families import FAMILIES

register_thd()
# Windows with softcap, sinks, latent attention and a hybrid; the others are marked slow.
SAMPLE = {"gemma2", "gpt_oss", "deepseek_v3", "lfm2"}
WITHOUT_ATTENTION = {"mamba", "falcon_mamba", "mamba2", "xlstm"}


@pytest.mark.parametrize(
    "name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
)
def test_every_family_on_the_portable_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    run = entry.run

    def noting(kernel: support.Kernel, *rest: Any) -> Any:
        ran.append(kernel)
        return run(kernel, *rest)

    monkeypatch.setattr(support, "_USUAL", ("portable",))
    monkeypatch.setattr(support, "_able_once", support._able)
    monkeypatch.setattr(entry, "run", noting)
    model = matrix.thd_model(name).eval()
    matrix.assert_same(matrix.run_packed(model), matrix.oracle(name)[1], tolerance=1e-5)
    assert set(ran) == (set() if name in WITHOUT_ATTENTION else {"portable"})


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 2), (3, 0)])
def test_a_pack_without_pairs_is_differentiable(queries: int, keys: int) -> None:
    shapes = [(queries, 2, 4), (keys, 2, 4), (keys, 2, 4)]
    inputs = [torch.ones(shape, requires_grad=True) for shape in shapes]
    offsets = [torch.tensor([0, n], dtype=torch.int32) for n in (queries, keys)]
    out = varlen_attention(*inputs, *offsets, queries, keys, backend="portable")
    assert out.shape == shapes[0]
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("backend", ["cpu", "portable"])
def test_infinite_sinks_take_all_or_nothing_also_from_queries_without_keys(backend: Any) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(rows, 2, 8, dtype=torch.float64, requires_grad=True) for rows in (7, 6, 6))
    # causal from the bottom right: the first two queries of the first sequence see no key
    offsets = torch.tensor([0, 4, 7], dtype=torch.int32), torch.tensor([0, 2, 6], dtype=torch.int32)

    def attend(sinks: Tensor | None) -> tuple[Tensor, ...]:
        out = varlen_attention(q, k, v, *offsets, 4, 4, sinks=sinks, backend=backend)
        leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    without = attend(None)
    out, dq, dk, dv, dsinks = attend(torch.tensor([-torch.inf, torch.inf], dtype=q.dtype, requires_grad=True))
    for ours, plain in zip((out, dq, dk, dv), without, strict=True):
        torch.testing.assert_close(ours[:, 0], plain[:, 0])  # a sink of -inf is no sink
        assert not ours[:, 1].any()  # a sink of +inf leaves nothing for the keys
    assert not dsinks.any()
