"""Recurrences slot by slot, in the dtype they are given, with the arguments of transformers' functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gates of one number a head, or of one a channel of the key."""
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    groups = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(groups, dim=2) for x in (query, key))

    state = value.new_zeros(len(value), value.shape[2], key.shape[3], value.shape[3])
    if initial_state is not None:
        state = initial_state.to(value)
    outputs = []
    for t in range(value.shape[1]):
        decay = g[:, t].exp()
        if decay.ndim < 3:  # one number for all channels of a head
            decay = decay[..., None]
        state = state * decay[..., None]
        k = key[:, t]
        v = value[:, t]
        recalled = torch.einsum("rhk,rhkv->rhv", k, state)
        state = state + torch.einsum("rhk,rhv->rhkv", k, (v - recalled) * beta[:, t, :, None])
        outputs.append(torch.einsum("rhk,rhkv->rhv", query[:, t], state) * query.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state if output_final_state else None


def state_space(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk_size: int, D: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), initial_states: Tensor | None = None,
    return_final_states: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """Mamba 2's scan, whose groups of heads share ``b`` and ``c``."""
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = functional.softplus(dt)
    dt = dt.clamp(*dt_limit)
    b = b.repeat_interleave(x.shape[2] // b.shape[2], dim=2)
    c = c.repeat_interleave(x.shape[2] // c.shape[2], dim=2)

    state = x.new_zeros(len(x), x.shape[2], x.shape[3], b.shape[3])
    if initial_states is not None:
        state = initial_states.to(x)
    outputs = []
    for t in range(x.shape[1]):
        state = state * (dt[:, t] * decay).exp()[..., None, None]
        state = state + torch.einsum("rhp,rhs->rhps", x[:, t] * dt[:, t, :, None], b[:, t])
        outputs.append(torch.einsum("rhps,rhs->rhp", state, c[:, t]))

    out = torch.stack(outputs, 1)
    if D is not None:
        out = out + D[:, None] * x
    return (out, state) if return_final_states else out
