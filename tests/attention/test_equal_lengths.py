"""Sequences of one length run as one call on views: bit for bit what the calls of a few each compute."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lightning_thd.attention.kernels import cpu, cpu_tiles
from lightning_thd.attention.kernels.cpu_plan import make_plan
from lightning_thd.attention.spec import AttentionSpec, make_spec


def both(lengths: list[int], dtype: torch.dtype, spec: AttentionSpec, kv_heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    total = sum(lengths)
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    # rows of one projection, as models hand them over: no tensor is contiguous
    joint = torch.randn(total, 4 + 2 * kv_heads, 32).to(dtype)
    q, k, v = joint.split([4, kv_heads, kv_heads], dim=1)
    out, lse = cpu.forward(q, k, v, cu, cu, spec=spec)
    return [out, lse, *cpu.backward(torch.randn_like(out), q, k, v, out, lse, cu, cu, spec=spec)]


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("length", "count"), [(1, 40), (16, 70), (37, 33), (41, 20), (128, 9), (1300, 2)])
def test_one_call_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, length: int, count: int, dtype: torch.dtype, kv_heads: int
) -> None:
    spec = make_spec(32, causal=True, window=None, scale=None, softcap=None)
    found = both([length] * count, dtype, spec, kv_heads)
    assert all(x.is_contiguous() for x in found)
    _without_one_call(monkeypatch)
    for mine, wanted in zip(found, both([length] * count, dtype, spec, kv_heads), strict=True):
        assert mine.dtype == wanted.dtype
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bidirectional_sequences_too(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    spec = make_spec(32, causal=False, window=None, scale=None, softcap=None)
    found = both([200] * 5, dtype, spec, 2)
    _without_one_call(monkeypatch)
    for mine, wanted in zip(found, both([200] * 5, dtype, spec, 2), strict=True):
        assert torch.equal(mine, wanted)


def test_it_is_one_call_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("flash_forward", "flash_backward"):
        original = getattr(cpu_tiles, name)
        monkeypatch.setattr(
            cpu_tiles, name, lambda *a, _run=original, **kw: (calls.append(a[1].shape[0]), _run(*a, **kw))[1]
        )
    spec = make_spec(32, causal=True, window=None, scale=None, softcap=None)
    both([16] * 100, torch.float32, spec, 4)
    assert calls == [100, 100]
    calls.clear()
    both([16] * 100, torch.bfloat16, spec, 4)  # widened a few sequences at a time
    assert calls[0] == 100
    assert len(calls) > 2


def _without_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*args: object, **kwargs: object) -> object:
        return dataclasses.replace(make_plan(*args, **kwargs), at_once=None)

    monkeypatch.setattr(cpu, "make_plan", cut)
