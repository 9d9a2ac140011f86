"""Strict doubles of GPU libraries: their signatures, what hardware refuses, and the CPU kernel's numbers.

Each takes exactly the parameters of the library (flash-attn 2.8.3, 3 of that tag and of main, flash-attn-4
4.0.0b36, Transformer Engine 2.20.2, torch 2.10 to 2.13; ``tests/signatures.json`` holds most): an
unknown keyword is a TypeError, a wrong dtype or layout an AssertionError.
"""

from __future__ import annotations

import functools
import importlib.machinery
import itertools
import sys
import types
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_thd._imports import available
from lightning_thd.attention import support
from lightning_thd.attention.kernels import cpu, flash, te
from lightning_thd.attention.kernels.cpu import varlen_attention_cpu
from lightning_thd.attention.spec import AttentionSpec
from tests.signatures import recorded

HALF = (torch.float16, torch.bfloat16)


def check_hardware(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int, *,
    one_size: bool = True,
) -> None:  # fmt: skip
    for x in (q, k, v):
        assert x.dtype in HALF
        assert x.dtype == q.dtype
        assert x.dim() == 3
        assert x.stride(2) == 1
        assert x.shape[2] % 8 == 0
        assert x.shape[2] <= 256
    assert q.shape[2] == k.shape[2]
    assert not one_size or v.shape[2] == q.shape[2]
    assert k.shape[1] == v.shape[1]
    assert q.shape[1] % k.shape[1] == 0
    for cu, longest, total in ((cu_seqlens_q, max_q, len(q)), (cu_seqlens_k, max_k, len(k))):
        assert type(longest) is int
        assert cu.dtype == torch.int32
        assert cu.is_contiguous()
        assert int(cu[-1]) == total  # rows after it would stay unwritten
        assert int(cu.diff().max()) <= longest


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Return out in the dtype of q and lse [H, T] with flash-attn's +inf where a query sees no key."""
    out, lse = cpu.forward(
        q.float(), k.float(), v.float(), cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), spec=spec
    )
    return out.to(q.dtype), lse.masked_fill(lse == -torch.inf, torch.inf).t().contiguous()


def run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert grad.dtype == q.dtype == out.dtype
    assert grad.stride(2) == 1
    assert grad.shape == out.shape == (*q.shape[:2], v.shape[2])
    assert lse.dtype == torch.float32
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.is_contiguous()
    assert not (lse == -torch.inf).any()  # exp(-inf - -inf) is NaN on the device
    saved = cpu.Saved(*(x.float() for x in (q, k, v, out)), lse.t())
    grads = cpu.backward(grad.float(), saved, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), spec=spec)
    dq, dk, dv = (x.to(q.dtype) for x in grads)
    return dq, dk, dv


def spec_of(
    scale: float | None, causal: bool, window: tuple[int | None, int | None], softcap: float | None = 0.0,
    max_k: int | None = None,
) -> AttentionSpec:  # fmt: skip
    """flash-attn's reading: causal means no key to the right; version 2 compares sides with ``max_k``."""
    assert scale is not None
    left, right = (-1 if side is None else side for side in window)
    if causal:
        right = 0
    if max_k is not None:
        assert max_k > 0
        left, right = (-1 if side >= max_k else side for side in (left, right))
        # An open side beside a bounded one becomes as wide as the keys.
        if left < 0 <= right:
            left = max_k
        elif right < 0 <= left:
            right = max_k
    return AttentionSpec(left=left, right=right, scale=scale, softcap=softcap or 0.0)


def strict(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Give a double the parameters of a library's function; the double names those that it looks at."""
    plain = Parameter.POSITIONAL_OR_KEYWORD
    missing = Parameter.empty
    signature = Signature(
        [Parameter(x, plain, default=None if has else missing) for x, has in recorded(name)]
    )

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def double(*args: Any, **kwargs: Any) -> Any:
            num_self = 1 if name.startswith("te_") else 0  # its self
            return function(*args[:num_self], **signature.bind(*args[num_self:], **kwargs).arguments)

        double.__signature__ = signature  # type: ignore[attr-defined]
        return double

    return decorate


# flash-attn 2


@strict("flash2_forward")
def flash2_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, **others,
):  # fmt: skip
    check_hardware(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert dropout_p == 0.0
    assert not any(others.values())
    spec = spec_of(softmax_scale, causal, (window_size_left, window_size_right), softcap, max_seqlen_k)
    assert max_seqlen_q > 1 or spec.left + spec.right > -2 or len(q) == len(cu_seqlens_q) - 1
    out, lse = run_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, spec)
    return out, lse, torch.empty(0, dtype=q.dtype), torch.empty(2, dtype=torch.int64)


@strict("flash2_backward")
def flash2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    deterministic,
):  # fmt: skip
    check_hardware(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert dropout_p == 0.0
    assert alibi_slopes is None
    assert isinstance(deterministic, bool)
    spec = spec_of(softmax_scale, causal, (window_size_left, window_size_right), softcap, max_seqlen_k)
    grads = run_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, spec)
    for x, grad, like in zip((dq, dk, dv), grads, (q, k, v), strict=True):
        assert x.shape == like.shape
        assert x.dtype == like.dtype
        assert x.is_contiguous()
        x.copy_(grad)
    return torch.empty(0)


# flash-attn 3


@strict("flash3_tag_forward")
def flash3_tag_forward(out, window_size=(-1, -1), **given):
    left, right = window_size
    return flash3_forward(window_size_left=left, window_size_right=right, **given)


@strict("flash3_tag_backward")
def flash3_tag_backward(q, causal, window_size=(-1, -1), deterministic=False, **given):
    assert not deterministic or q.shape[2] <= 192
    sides = dict(zip(("window_size_left", "window_size_right"), window_size, strict=True))
    flash3_backward(q=q, is_causal=causal, deterministic=deterministic, **sides, **given)


class Operator(torch.library.CustomOpDef):
    """Stands for what ``torch.library.custom_op`` makes of a function: its call hides the parameters."""

    def __init__(self, function: Any) -> None:
        self._init_fn = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._init_fn(*args, **kwargs)


def flash3_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
    cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
    seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    check_hardware(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    spec = spec_of(softmax_scale, causal, (window_size_left, window_size_right), softcap)
    out, lse = run_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, spec)
    return out, lse, torch.tensor([]), torch.tensor([])


def flash3_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    flash2_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_q + max_seqlen_k, 0.0, softmax_scale, is_causal, window_size_left, window_size_right,
        softcap, None, deterministic,
    )  # fmt: skip
    return torch.empty(0)


# flash-attn 4


def flash4_sizes(q: Tensor, v: Tensor) -> None:
    sizes = (q.shape[2], v.shape[2])
    assert max(sizes) <= 128 or sizes in ((192, 128), (256, 256))


@strict("flash4_forward")
def flash4_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, softcap,
    window_size_left, window_size_right, return_lse,
):  # fmt: skip
    check_hardware(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, one_size=False)
    flash4_sizes(q, v)
    assert return_lse
    assert softcap is None or softcap > 0
    for side in (window_size_left, window_size_right):
        assert side is None or side >= 0
    spec = spec_of(softmax_scale, causal, (window_size_left, window_size_right), softcap)
    out, lse = run_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, spec)
    return out, lse, None, None, None


@strict("flash4_backward")
def flash4_backward(
    q, k, v, out, dout, lse, softmax_scale, causal, softcap, window_size_left, window_size_right,
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, deterministic,
):  # fmt: skip
    check_hardware(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, one_size=False)
    flash4_sizes(q, v)
    spec = spec_of(softmax_scale, causal, (window_size_left, window_size_right), softcap)
    return run_backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, spec)


# The operators under torch.nn.attention.varlen


def _aten_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
    block_table=None, num_splits=None,
):  # fmt: skip
    check_hardware(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    assert dropout_p == 0.0
    assert not return_debug_mask
    spec = spec_of(scale, is_causal, (window_size_left, window_size_right), max_k=max_k)
    assert max_q > 1 or spec.left + spec.right > -2 or len(query) == len(cum_seq_q) - 1
    out, lse = run_forward(query, key, value, cum_seq_q, cum_seq_k, spec)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def aten_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    check_hardware(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    assert rng_state.dtype == torch.uint64
    spec = spec_of(scale, is_causal, (window_size_left, window_size_right), max_k=max_k)
    return run_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, spec)


class _AtenFlash(torch.autograd.Function):
    """The forward operator with torch's own formula for its gradients."""

    @staticmethod
    def forward(ctx, options, *arguments):
        results = _aten_forward(*arguments, **options)
        ctx.save_for_backward(*arguments[:3], *results[:2], *arguments[3:5], *results[2:4])
        ctx.host = arguments[5:9]  # longest sequences, dropout, causal
        ctx.options = options
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, *_):
        *tensors, rng_state, unused = ctx.saved_tensors
        gradients = aten_backward(
            grad_out.contiguous(), *tensors, *ctx.host, rng_state, unused, **ctx.options
        )
        return None, *gradients, *[None] * 7


def aten_forward(*arguments, **options):
    return _AtenFlash.apply(options, *arguments)


def efficient_spec(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, longest: tuple[int, int],
    mask: int, window: int | None, scale: float | None,
) -> AttentionSpec:  # fmt: skip
    for x in (q, k, v):
        assert x.dim() == 4
        assert x.shape[0] == 1
        assert x.shape[2] == q.shape[2]  # no shared heads
        assert x.dtype == q.dtype
        assert x.dtype in (torch.float32, *HALF)
        assert x.stride(3) == 1
        assert x.shape[3] % 8 == 0
    assert mask in (0, 2)
    assert window is None or (window > 0 and mask == 2)
    for cu, most in zip((cu_seqlens_q, cu_seqlens_k), longest, strict=True):
        assert cu.dtype == torch.int32
        assert type(most) is int
        assert int(cu.diff().max()) <= most
    assert scale is not None

    return AttentionSpec(left=-1 if window is None else window - 1, right=-1 if mask == 0 else 0, scale=scale)


def efficient_forward(
    query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    custom_mask_type, compute_log_sumexp=False, *, scale=None, seqlen_k=None, window_size=None,
):  # fmt: skip
    """Leave rows that see nothing undefined, as the kernel may."""
    assert (bias, dropout_p, compute_log_sumexp, seqlen_k) == (None, 0.0, True, None)
    longest = (max_seqlen_q, max_seqlen_k)
    spec = efficient_spec(
        query, key, value, cu_seqlens_q, cu_seqlens_k, longest, custom_mask_type, window_size, scale
    )
    cu = cu_seqlens_q.tolist()
    inputs = (x[0].float() for x in (query, key, value))
    out, lse = cpu.forward(*inputs, cu, cu_seqlens_k.tolist(), spec=spec)
    out, lse = (
        x.masked_fill((lse == -torch.inf).view(*lse.shape, *[1] * (x.dim() - 2)), torch.nan)
        for x in (out, lse)
    )
    rows = -(-max_seqlen_q // 32) * 32
    wide = torch.full((len(cu) - 1, query.shape[2], rows), torch.inf)
    for i, (start, stop) in enumerate(itertools.pairwise(cu)):
        wide[i, :, : stop - start] = lse[start:stop].t()
    none = torch.zeros((), dtype=torch.int64)
    return out.to(query.dtype)[None], wide, none, none, max_seqlen_q, max_seqlen_k


def efficient_backward(
    grad_out_, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    logsumexp, dropout_p, philox_seed, philox_offset, custom_mask_type, bias_requires_grad, *, scale=None,
    num_splits_key=None, window_size=None, shared_storage_dqdkdv=False,
):  # fmt: skip
    assert (bias, dropout_p, bias_requires_grad, shared_storage_dqdkdv) == (None, 0.0, False, False)
    assert philox_seed.dtype == philox_offset.dtype == torch.int64
    assert num_splits_key in (None, 1)
    assert grad_out_.shape == out.shape
    assert grad_out_.dtype == out.dtype == query.dtype

    cu = cu_seqlens_q.tolist()
    assert logsumexp.dtype == torch.float32
    assert logsumexp.shape == (len(cu) - 1, query.shape[2], -(-max_seqlen_q // 32) * 32)
    assert logsumexp.is_contiguous()

    longest = (max_seqlen_q, max_seqlen_k)
    spec = efficient_spec(
        query, key, value, cu_seqlens_q, cu_seqlens_k, longest, custom_mask_type, window_size, scale
    )
    lse = torch.cat([logsumexp[i, :, : b - a].t() for i, (a, b) in enumerate(itertools.pairwise(cu))])
    grad, *inputs = (x[0].float() for x in (grad_out_, query, key, value, out))
    grads = list(cpu.backward(grad, cpu.Saved(*inputs, lse), cu, cu_seqlens_k.tolist(), spec=spec))
    grads[0][(lse == torch.inf).all(1)] = torch.nan

    for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens_k.tolist())):
        if cu[i] == cu[i + 1]:
            grads[1][a:b] = grads[2][a:b] = torch.nan

    return *(x.to(query.dtype)[None] for x in grads), torch.empty(0)


# Transformer Engine


class DotProductAttention(torch.nn.Module):
    """Signatures of transformer_engine.pytorch.DotProductAttention."""

    @strict("te_init")
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups, attention_dropout, qkv_format,
        attention_type, softmax_scale,
    ) -> None:  # fmt: skip
        super().__init__()
        assert attention_dropout == 0.0
        assert attention_type in ("self", "cross")
        self.sizes = (num_attention_heads, num_gqa_groups, kv_channels)
        self.scale = softmax_scale

    @strict("te_forward")
    def forward(
        self, query_layer, key_layer, value_layer, qkv_format, cu_seqlens_q, cu_seqlens_kv,
        cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, attn_mask_type, window_size,
        pad_between_seqs,
    ):  # fmt: skip
        q = query_layer
        k = key_layer
        v = value_layer
        channels = q.shape[2] if q.shape[2] == v.shape[2] else (q.shape[2], v.shape[2])

        assert self.sizes == (q.shape[1], k.shape[1], channels)
        assert qkv_format == "thd"
        assert all(x.is_contiguous() for x in (q, k, v))
        check_hardware(
            q, k, v, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, one_size=False
        )

        same = torch.equal(cu_seqlens_q, cu_seqlens_q_padded)
        assert pad_between_seqs == (not same)
        assert attn_mask_type in ("padding", "padding_causal", "padding_causal_bottom_right")

        causal = attn_mask_type != "padding"
        if attn_mask_type == "padding_causal":  # top-left: right only where lengths agree
            assert torch.equal(cu_seqlens_q, cu_seqlens_kv)

        left, right = window_size
        if causal:
            assert right == 0
        else:  # check_set_window_size: both sides open, or both closed
            assert window_size == (-1, -1) or (left >= 0 and right >= 0)

        rows = real_rows(cu_seqlens_q, cu_seqlens_q_padded)
        keys = real_rows(cu_seqlens_kv, cu_seqlens_kv_padded)
        real, _ = varlen_attention_cpu(
            q[rows], k[keys], v[keys], cu_seqlens_q, cu_seqlens_kv, None, max_seqlen_q, max_seqlen_kv,
            left, right, self.scale, 0.0,
        )  # fmt: skip
        out = real.new_zeros(q.shape[0], *real.shape[1:]).index_copy(0, rows, real)
        return out.flatten(1)


def real_rows(cu: Tensor, padded: Tensor) -> Tensor:
    starts = padded[:-1].tolist()
    lengths = cu.diff().tolist()
    return torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])


FLASH2 = {
    "_wrapped_flash_attn_varlen_forward": flash2_forward,
    "_wrapped_flash_attn_varlen_backward": flash2_backward,
}
FLASH3: dict[str, Any] = {
    "_flash_attn_forward": Operator(flash3_forward),
    "_flash_attn_backward": Operator(flash3_backward),
}
FLASH3_TAG = {"_flash_attn_forward": flash3_tag_forward, "_flash_attn_backward": flash3_tag_backward}
FLASH4 = {"_flash_attn_fwd": flash4_forward, "_flash_attn_bwd": flash4_backward}
PREBUILT = {"kernels-community/flash-attn2": FLASH2, "kernels-community/flash-attn3": FLASH3}
LIBRARIES: dict[str, tuple[str, dict[str, Any]]] = {
    "flash2": ("flash_attn.flash_attn_interface", FLASH2),
    "flash3": ("flash_attn_interface", FLASH3),
    "flash3 tag": ("flash_attn_interface", FLASH3_TAG),
    "flash4": ("flash_attn.cute.interface", FLASH4),
    "te": ("transformer_engine.pytorch", {"DotProductAttention": DotProductAttention}),
}


def install(monkeypatch: pytest.MonkeyPatch, *which: str) -> None:
    """Make libraries importable, by the names of ``LIBRARIES``."""
    for path, attributes in map(LIBRARIES.__getitem__, which):
        for name in itertools.accumulate(path.split("."), "{}.{}".format):
            if name not in sys.modules:
                module = types.ModuleType(name)
                module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
                module.__path__ = []  # type: ignore[attr-defined]
                vars(module).update(attributes if name == path else {})
                monkeypatch.setitem(sys.modules, name, module)
    available.cache_clear()
    support._able_once.cache_clear()
    te._module.cache_clear()


def install_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch's flash operators run here."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten_backward)


def install_efficient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch's memory-efficient attention run here."""
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", efficient_forward)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_backward", efficient_backward)


def install_prebuilt(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
) -> list[tuple[str, int]]:
    """Make the package ``kernels`` importable, with flash-attn 2 and 3 or an error; return the requests."""
    loaded = []

    def get_kernel(repo_id: str, *, version: int) -> Any:
        loaded.append((repo_id, version))
        if error is not None:
            raise error
        return types.SimpleNamespace(flash_attn_interface=types.SimpleNamespace(**PREBUILT[repo_id]))

    module = types.ModuleType("kernels")
    module.__spec__ = importlib.machinery.ModuleSpec("kernels", None)
    module.get_kernel = get_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", module)
    monkeypatch.setattr(flash, "_sees_gpu", lambda: True)
    forget()
    return loaded


def forget() -> None:
    """Drop what was cached about the doubles."""
    available.cache_clear()
    support._able_once.cache_clear()
    support._trial.cache_clear()
    support._notice_tried.cache_clear()
    flash.prebuilt_trouble.cache_clear()
    flash._INTERFACES.clear()
    te._module.cache_clear()
