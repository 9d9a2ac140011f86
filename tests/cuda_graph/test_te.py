"""Transformer Engine reads the device back where arguments are left to it; nothing is left to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_thd.attention.kernels import te
from lightning_thd.attention.spec import Offsets, make_spec
from lightning_thd.cuda_graph.recording import RecordingBackend

# What DotProductAttention works out from device tensors when it is None: the longest lengths by max().item(),
# and whether there are pads between sequences by comparing both offsets.
LEFT_TO_IT = (
    "max_seqlen_q",
    "max_seqlen_kv",
    "pad_between_seqs",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
)


class Attention:
    """Stands for the module, and reads the device where the real one would."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        self.calls.append(kwargs)
        for name in LEFT_TO_IT:
            if kwargs.get(name) is None:
                kwargs["cu_seqlens_q"].diff().max().item()
        return (q * 1.0).flatten(1)


def test_a_call_leaves_nothing_to_be_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Attention()
    monkeypatch.setattr(te, "_module", lambda *_: module)
    q, offsets = torch.randn(8, 2, 4), torch.tensor([0, 3, 8], dtype=torch.int32)
    at = Offsets(offsets, offsets, 5, 5)
    graph, out = RecordingBackend().capture(lambda: te.attend(q, q, q, at, make_spec(4)))
    wanted = out.clone()
    q.mul_(2.0)
    graph.replay()
    assert torch.equal(out, 2.0 * wanted)
    (call,) = module.calls
    assert type(call["max_seqlen_q"]) is type(call["max_seqlen_kv"]) is int
    assert call["pad_between_seqs"] is False
    assert call["cu_seqlens_q_padded"] is call["cu_seqlens_kv_padded"] is offsets
