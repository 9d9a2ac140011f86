"""Attention of one rank's queries to parts of the keys -> attention to all keys, merged by log-sum-exp.

The result over all keys is the sum of the parts' results, each weighted by exp(lse of the part - lse of all
keys). Given out and lse of all keys, a kernel's backward is exact for any part of the keys.
Legend: N slots of a shard, H query heads, G key-value heads, D head size, E value head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_thd.attention.kernels.raw import RawKernel, Saved, apply_sinks, sinks_gradient
from lightning_thd.attention.kernels.raw import widen as widen_heads
from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.boundaries import KernelCall
from lightning_thd.flops.listen import reported
from lightning_thd.parallel.context.needs import BlockCall, RingStep
from lightning_thd.parallel.context.traffic import Traffic


class KeySource:
    """Keys and values by step, as ``joined`` rows: this rank's in step 0, then, in a ring, other ranks'."""

    _local_rows: Any
    _local_grad: Any

    def __init__(
        self,
        calls: Sequence[Sequence[BlockCall]],
        steps: Sequence[RingStep] = (),
        group: dist.ProcessGroup | None = None,  # the ranks of a ring
        traffic: Traffic | None = None,  # counts what they send each other
    ) -> None:
        self.calls = calls
        self.steps = steps
        self.group = group
        self.traffic = traffic
        self.release()

    def begin(self, rows: Tensor) -> None:
        """Store this rank's rows, which are step 0's, and start the transfer of step 1's rows, if any."""
        if self.group is not None:
            assert self.traffic is not None
            self.traffic.connect(self.group, rows.device)
        self.release()
        self._local_rows = rows
        self._send(1)

    def rows(self, step: int) -> Tensor:
        """Return a step's rows; in steps after 0, wait for them and start the transfer of the next step's."""
        if step == 0:
            local: Tensor = self._local_rows
            return local

        received, transfers, _ = self._arriving.pop(step)
        _wait(transfers)
        self._send(step + 1)
        return received

    def return_gradient(self, step: int, grad: Tensor) -> None:
        """Start to send a step's gradient to its rows' rank, and to receive one for this rank's own rows."""
        if step == 0:
            self._local_grad = grad  # step 0 has this rank's own rows
            return

        exchange = self.steps[step]
        sent = grad.to(self._local_rows.dtype)  # so that gradients take no more bytes than the rows did
        received = sent.new_empty((len(exchange.send_rows), sent.shape[1]))
        transfers = self._transfer(sent, exchange.source, received, exchange.to)
        self._returning.append((received, transfers, sent, exchange.send_rows))

    def total(self) -> Tensor:
        """Wait for the other ranks' gradients, and add them to the local one in the order of the steps."""
        total: Tensor = self._local_grad
        for received, transfers, _, rows in self._returning:
            _wait(transfers)
            total.index_add_(0, rows, received.to(total.dtype))
        return total

    def release(self) -> None:
        """Drop the rows and their gradients."""
        self._local_rows = None
        self._local_grad = None
        # What is sent is held until its transfer has ended: received, transfers, sent (and the local rows).
        self._arriving: dict[int, tuple[Tensor, list[dist.Work], Tensor]] = {}
        self._returning: list[tuple[Tensor, list[dist.Work], Tensor, Tensor]] = []

    def _send(self, step: int) -> None:
        """Start the transfer of a step's rows, from this rank's to one rank and from another to this one."""
        if step >= len(self.steps):
            return
        exchange = self.steps[step]
        sent = self._local_rows.index_select(0, exchange.send_rows)
        received = sent.new_empty((exchange.receive_count, sent.shape[1]))
        transfers = self._transfer(sent, exchange.to, received, exchange.source)
        self._arriving[step] = (received, transfers, sent)

    def _transfer(self, sent: Tensor, to: int, received: Tensor, source: int) -> list[dist.Work]:
        """Post a send and a receive; both ranks know the sizes, so empty messages are left out."""
        assert self.traffic is not None
        self.traffic.count("bytes", received.nbytes)
        posts = []
        if len(sent):
            posts.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=to))
        if len(received):
            posts.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        return dist.batch_isend_irecv(posts) if posts else []


def _wait(transfers: list[dist.Work]) -> None:
    for transfer in transfers:
        transfer.wait()


def merged_attention(
    kernel: RawKernel,
    source: KeySource,
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGE: Tensor,
    *,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to keys that arrive in parts; all ranks call this together if keys come from other ranks."""
    value_size = v_NGE.shape[2]
    q, k, v = widen_heads(kernel, q_NHD, k_NGD, v_NGE)
    out: Tensor = _Merged.apply(kernel, source, q, k, v, spec, sinks)  # type: ignore[no-untyped-call]
    return out[..., :value_size].to(q_NHD.dtype)


class _Merged(torch.autograd.Function):
    """Attention in steps, each to the keys that have arrived; the backward fetches all keys again."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: RawKernel,
        source: KeySource,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        sinks: Tensor | None,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:2], v.shape[2]), dtype=wide)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=wide)

        source.begin(joined(k, v))
        for step, calls in enumerate(source.calls):
            rows = source.rows(step)
            for call in calls:
                k_part, v_part = split(rows.index_select(0, call.keys), k, v)
                part_out, part_lse = kernel.forward(
                    _rows_of(q, call), k_part, v_part, _kernel_call(call), _spec_of(spec, call)
                )
                _merge(out, lse, part_out, part_lse, call)
        source.release()

        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
        out = out.to(q.dtype)

        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.kernel = kernel
        ctx.source = source
        ctx.spec = spec
        return out

    @staticmethod
    @reported
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        source: KeySource = ctx.source
        grad = grads[0].contiguous()
        finite = lse.masked_fill(lse == -torch.inf, torch.inf)  # queries without keys get weights of 0
        dq = torch.zeros_like(q, dtype=lse.dtype)

        source.begin(joined(k, v))
        for step, calls in enumerate(source.calls):
            rows = source.rows(step)
            drows = torch.zeros_like(rows, dtype=lse.dtype)
            for call in calls:
                k_part, v_part = split(rows.index_select(0, call.keys), k, v)
                saved = Saved(_rows_of(q, call), k_part, v_part, _rows_of(out, call), _rows_of(finite, call))
                part_dq, part_dk, part_dv = ctx.kernel.backward(
                    _rows_of(grad, call), saved, _kernel_call(call), _spec_of(ctx.spec, call)
                )
                _add(dq, part_dq, call)
                drows.index_add_(0, call.keys, joined(part_dk, part_dv).to(drows.dtype))
            source.return_gradient(step, drows)
        dk, dv = split(source.total(), k, v)
        source.release()

        dsinks = None
        if sinks is not None:
            dsinks = sinks_gradient(grad, out, lse, sinks)
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, dsinks


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, call: BlockCall) -> None:
    """Merge the result for another part of the keys into the call's rows of out and lse, in place."""
    part_lse = part_lse.masked_fill(part_lse == torch.inf, -torch.inf).to(lse.dtype)
    old_out = _rows_of(out, call)
    old_lse = _rows_of(lse, call)
    new_lse = torch.logaddexp(old_lse, part_lse)

    # A query that sees no key so far has new_lse -inf. Subtract 0 instead then, because -inf - -inf is NaN.
    floor = new_lse.masked_fill(new_lse == -torch.inf, 0.0)
    old_share = torch.exp(old_lse - floor).unsqueeze(-1)
    part_share = torch.exp(part_lse - floor).unsqueeze(-1)
    merged = old_out * old_share + part.to(out.dtype) * part_share

    if call.q_rows is None:
        out.copy_(merged)
        lse.copy_(new_lse)
    else:
        out.index_copy_(0, call.q_rows, merged)
        lse.index_copy_(0, call.q_rows, new_lse)


def _add(total: Tensor, part: Tensor, call: BlockCall) -> None:
    """Add a part's gradient to the call's rows of the total, in place."""
    if call.q_rows is None:
        total += part
    else:
        total.index_add_(0, call.q_rows, part.to(total.dtype))


def _rows_of(x: Tensor, call: BlockCall) -> Tensor:
    """Return the rows of the queries that take part in a call; None means all."""
    return x if call.q_rows is None else x.index_select(0, call.q_rows)


def _kernel_call(call: BlockCall) -> KernelCall:
    return KernelCall(call.cu_seqlens_q, call.cu_seqlens_kv, call.max_seqlen_q, call.max_seqlen_kv)


def _spec_of(spec: AttentionSpec, call: BlockCall) -> AttentionSpec:
    return AttentionSpec(left=call.left, right=call.right, scale=spec.scale, softcap=spec.softcap)


def joined(k: Tensor, v: Tensor) -> Tensor:
    """Concatenate keys and values as rows ``[N, G * (D + E)]``, to send them together."""
    return torch.cat([k.flatten(1), v.flatten(1)], dim=1)


def split(rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Undo ``joined``: split rows into keys and values with the heads and head sizes of ``k`` and ``v``."""
    width = k.shape[1] * k.shape[2]
    keys = rows[:, :width].reshape(-1, *k.shape[1:])
    values = rows[:, width:].reshape(-1, *v.shape[1:])
    return keys, values
