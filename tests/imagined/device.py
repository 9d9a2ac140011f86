"""A GPU that is only imagined: tensors of a CPU build of torch that say "cuda:0" and refuse mixed devices.

``with imagined_gpu(capability=(9, 0)) as log``: ``log.reads`` is (operator, caller),
``log.uploads`` is (operator, bytes, pinned, non_blocking, caller). See README.md.
"""

import contextlib
import ctypes
import hashlib
import os
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path
from unittest import mock

import torch

HERE = Path(__file__).parent
# Outside of the checkout: compiling takes twenty seconds of a processor.
BUILT = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lightning_thd_imagined"
CUDA = torch.device("cuda:0")
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
_kept: list = []
_DEEP = int(os.environ.get("IMAGINED_FRAMES", "0"))  # callers of reads as chains of this many frames


class Log:
    """What the host asked of the device: reads, uploads, pins and notes, each with its caller."""

    def __init__(self):
        self.reads, self.uploads, self.pins, self.notes = [], [], [], []
        self.counting, self.sync_mode, self.stacks = True, 0, False
        self.ordering, self.order, self.collectives, self.collective_steps = False, [], [], []
        self.step, self.read_steps, self.upload_steps = (
            0,
            [],
            [],
        )  # optimizer steps so far, at every read and upload

    def clear(self):
        for x in (self.reads, self.uploads, self.pins, self.notes, self.read_steps, self.upload_steps):
            x.clear()


LOG = Log()


def _frames():
    f = sys._getframe(1)
    while f is not None:
        yield f
        f = f.f_back


def chain(count: int) -> str:
    """The nearest frames, this project's and its hosts', from the inside out."""
    out = []
    for f in _frames():
        name = f.f_code.co_filename
        if (
            "/imagined" in name
            or "/torch/" in name
            or ("site-packages" not in name and "/lightning_thd/" not in name and "/examples/" not in name)
        ):
            continue
        out.append(f"{'/'.join(name.split('/')[-2:])}:{f.f_lineno} {f.f_code.co_name}")
    return " < ".join(out[:count])


def caller() -> str:
    if _DEEP:
        return chain(_DEEP)
    frames = [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in _frames()]
    for places in (
        ("/lightning_thd/",),
        ("/site-packages/lightning", "/transformers/", "/accelerate/", "/trl/", "/torchao/"),
        ("/tests/", "/benchmarks/", "/examples/", "<string>", "<stdin>"),
    ):
        for name, line, function in frames:
            if any(p in name for p in places) and "/imagined/" not in name:
                short = (
                    name.split("/lightning_thd/")[-1]
                    if "/lightning_thd/" in name
                    else "/".join(name.split("/")[-3:])
                )
                return f"{short}:{line} {function}"
    for name, line, function in frames:
        if "/imagined" not in name:
            return f"{'/'.join(name.split('/')[-3:])}:{line} {function}"
    return "backward" if threading.current_thread() is not threading.main_thread() else "?"


def _told(kind, name, size, flags):
    try:
        kind, name = kind.decode(), name.decode()
        if kind == "read":
            if not LOG.counting:
                return 0
            LOG.reads.append((name.removeprefix("aten::"), caller()))
            LOG.read_steps.append(LOG.step)
            waits = "not waiting" not in name
            if waits and _lib.imagined_capturing():
                return 2
            if waits and LOG.sync_mode == 2:
                return 1
        elif kind == "upload":
            if not LOG.counting:
                return 0
            pinned, free = bool(flags & 1), bool(flags & 2)
            LOG.uploads.append((name.removeprefix("aten::"), size, pinned, free, caller()))
            LOG.upload_steps.append(LOG.step)
            if _lib.imagined_capturing() and not pinned:
                return 2
            if not free and LOG.sync_mode == 2:
                return 1
        elif kind == "pin":
            LOG.pins.append((size, caller()))
        else:
            LOG.notes.append((kind, name, caller()))
        return 0
    except BaseException:  # nothing may leave a callback
        return 0


def _build() -> Path:
    source = HERE / "device.cpp"
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    out = BUILT / f"libimagined_{key}.so"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        root = Path(torch.__file__).parent
        part = out.with_suffix(f".{os.getpid()}.part")
        subprocess.run(
            [
                "g++",
                "-O1",
                "-shared",
                "-fPIC",
                "-std=c++20",
                "-w",
                f"-I{root}/include",
                f"-I{root}/include/torch/csrc/api/include",
                str(source),
                f"-L{root}/lib",
                "-lc10",
                "-ltorch_cpu",
                "-ltorch",
                f"-Wl,-rpath,{root}/lib",
                "-o",
                str(part),
            ],
            check=True,
        )
        part.rename(out)
    return out


def _load():
    lib = ctypes.CDLL(str(_build()))
    lib.imagined_allocated.restype = lib.imagined_peak.restype = lib.imagined_allocations.restype = (
        lib.imagined_steps.restype
    ) = ctypes.c_int64
    lib.imagined_get_stream.restype = ctypes.c_int64
    lib.imagined_set_stream.argtypes = lib.imagined_begin.argtypes = [ctypes.c_int64]
    lib.imagined_stream_of.restype = ctypes.c_int64
    lib.imagined_set_stream_of.argtypes = [ctypes.c_int, ctypes.c_int64]
    lib.imagined_end.restype = ctypes.c_void_p
    lib.imagined_steps.argtypes = lib.imagined_free.argtypes = [ctypes.c_void_p]
    lib.imagined_manual_seed.argtypes = [ctypes.c_uint64]
    if not lib.imagined_jump():
        raise RuntimeError("imagined: at::getAccelerator could not be replaced")
    f = _CALLBACK(_told)
    _kept.append(f)
    lib.imagined_set_callback(f)
    return lib


# ------------------------------------------------------------------------------- kernels that CPU torch lacks
def _mask(Q, K, left, right):
    i, j = torch.arange(Q)[:, None] + K - Q, torch.arange(K)[None]
    m = torch.ones(Q, K, dtype=torch.bool)
    if left is not None and left >= 0:
        m &= j >= i - left
    if right is not None and right >= 0:
        m &= j <= i + right
    return m


def _flash_checks(q, k, v, cu_q, cu_k, max_q, max_k):
    if q.dtype not in (torch.float16, torch.bfloat16) and not os.environ.get("IMAGINED_FLASH_FP32"):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("query and key must have the same dtype")
    if cu_q.dtype != torch.int32 or cu_k.dtype != torch.int32:
        raise RuntimeError("cu_seqlens_q must have dtype int32")
    for x in (q, k, v):
        if x.stride(-1) != 1:
            raise RuntimeError("Input tensor must have contiguous last dimension")
    if not (cu_q.is_contiguous() and cu_k.is_contiguous()):
        raise RuntimeError("cu_seqlens_q must be contiguous")
    if q.shape[-1] > 256 or q.shape[-1] % 8 or q.shape[-1] != v.shape[-1]:
        raise RuntimeError(
            "FlashAttention forward only supports head dimension at most 256 and multiples of 8, not "
            f"{q.shape[-1]}, {v.shape[-1]}"
        )
    if q.shape[1] % k.shape[1]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    for cu, most, name in ((cu_q, max_q, "q"), (cu_k, max_k, "k")):
        lengths = cu.diff()
        if len(lengths) and int(lengths.min()) < 0:
            raise AssertionError(f"imagined CUDA: cu_seqlens_{name} falls: {cu.tolist()[:20]}")
        if len(lengths) and int(lengths.max()) > most:
            raise AssertionError(
                f"imagined CUDA: max_seqlen_{name}={most} is below the longest sequence {int(lengths.max())}"
            )
    if int(cu_q[-1]) > q.shape[0] or int(cu_k[-1]) > k.shape[0]:
        raise AssertionError("imagined CUDA: cu_seqlens reach beyond the tokens")


def _fa_forward(
    q,
    k,
    v,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    _refuse_outside("aten::_flash_attention_forward")
    assert seqused_k is None
    assert alibi_slopes is None
    assert block_table is None
    assert dropout_p == 0
    _flash_checks(q, k, v, cu_q, cu_k, max_q, max_k)
    right = 0 if is_causal else window_size_right
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.full(
        q.shape, float("nan"), dtype=q.dtype
    )  # the kernel writes no token outside of the sequences
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"), dtype=torch.float32)
    for i in range(len(cu_q) - 1):
        a, b = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        if a.start == a.stop:
            continue
        qs, ks, vs = q[a].float(), k[b].float(), v[b].float()
        g = qs.shape[1] // ks.shape[1]
        ks, vs = ks.repeat_interleave(g, 1), vs.repeat_interleave(g, 1)
        s = torch.einsum("qhd,khd->hqk", qs, ks) * scale
        s = s.masked_fill(~_mask(qs.shape[0], ks.shape[0], window_size_left, right), -torch.inf)
        total = s.logsumexp(-1)
        p = (s - torch.where(total.isinf(), 0, total)[..., None]).exp()
        out[a] = torch.einsum("hqk,khd->qhd", p, vs).to(q.dtype)
        lse[:, a] = torch.where(
            total == -torch.inf, torch.inf, total
        )  # flash-attn writes +inf for rows that see nothing
    return (
        out,
        lse,
        torch.zeros(2, dtype=torch.uint64),
        torch.zeros((), dtype=torch.uint64),
        torch.empty(0, dtype=q.dtype),
    )


def _fa_backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng,
    unused,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    _refuse_outside("aten::_flash_attention_backward")
    _flash_checks(q, k, v, cu_q, cu_k, max_q, max_k)
    if grad.dtype != q.dtype or out.dtype != q.dtype:
        raise RuntimeError("query and dout must have the same dtype")
    if lse.dtype != torch.float32 or lse.shape != (q.shape[1], q.shape[0]):
        raise RuntimeError(f"softmax_lse has {lse.dtype} {tuple(lse.shape)}")
    if grad.stride(-1) != 1 and not grad.is_contiguous():
        grad = grad.contiguous()
    right = 0 if is_causal else window_size_right
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    nan = float("nan")
    dq, dk, dv = (torch.full(x.shape, nan, dtype=x.dtype) for x in (q, k, v))
    for i in range(len(cu_q) - 1):
        a, b = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        qs, ks, vs, g, o = q[a].float(), k[b].float(), v[b].float(), grad[a].float(), out[a].float()
        if a.start == a.stop:
            dk[b], dv[b] = 0, 0
            continue
        n = qs.shape[1] // ks.shape[1]
        kr, vr = ks.repeat_interleave(n, 1), vs.repeat_interleave(n, 1)
        s = torch.einsum("qhd,khd->hqk", qs, kr) * scale
        m = _mask(qs.shape[0], ks.shape[0], window_size_left, right)
        p = (s - lse[:, a][..., None]).exp().masked_fill(~m, 0)
        dvr = torch.einsum("hqk,qhd->khd", p, g)
        dp = torch.einsum("qhd,khd->hqk", g, vr)
        ds = p * (dp - (g * o).sum(-1).T[..., None]) * scale
        dq[a] = torch.einsum("hqk,khd->qhd", ds, kr).to(q.dtype)
        dk[b] = torch.einsum("hqk,qhd->khd", ds, qs).unflatten(1, (-1, n)).sum(2).to(k.dtype)
        dv[b] = dvr.unflatten(1, (-1, n)).sum(2).to(v.dtype)
    return dq, dk, dv


def _efficient_parts(q, k, v, cu_q, cu_k, max_q, max_k, mask_type, window):
    """What CUDA's memory-efficient kernel checks, then (slices, mask) of each sequence."""
    if q.dim() != 4 or q.shape[0] != 1 or k.shape[0] != 1 or v.shape[0] != 1:
        raise RuntimeError("cu_seqlen only supports batch_size=1")
    if q.shape[2] != k.shape[2] or q.shape[2] != v.shape[2] or q.shape[3] != k.shape[3]:
        raise RuntimeError(
            "Query/Key/Value should all have the same number of heads, and query and key one head size"
        )
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        raise RuntimeError(f"Only fp32, half & bf16 supported, got {q.dtype}")
    if q.dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError("bfloat16 is only supported on sm80+ here")
    for x in (cu_q, cu_k):
        if x is None or x.dtype != torch.int32 or x.dim() != 1 or not x.is_contiguous():
            raise RuntimeError("cu_seqlens must be given, int32, contiguous")
    if len(cu_q) != len(cu_k) or max_q is None or max_k is None:
        raise RuntimeError(
            "cu_seqlens_q and cu_seqlens_k must have one length, max_seqlen_q and max_seqlen_k be given"
        )
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise RuntimeError("the last dimension must be contiguous")
    if window is not None and window > 0 and mask_type == 0:
        raise RuntimeError("window_size is used with causal masks alone")
    for i in range(len(cu_q) - 1):
        a, b = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        n, m = a.stop - a.start, b.stop - b.start
        if n > max_q or m > max_k:
            raise RuntimeError("a sequence is longer than max_seqlen: the kernel would leave rows unwritten")
        row, col = torch.arange(n)[:, None], torch.arange(m)[None]
        row = row + (m - n if mask_type == 2 else 0)
        seen = torch.ones(n, m, dtype=torch.bool) if mask_type == 0 else col <= row
        if window is not None and window > 0:
            seen = seen & (col > row - window)
        yield i, a, b, seen


def _ea_forward(
    q,
    k,
    v,
    bias,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout_p,
    custom_mask_type,
    compute_log_sumexp=False,
    *,
    scale=None,
    seqlen_k=None,
    window_size=None,
):
    _refuse_outside("aten::_efficient_attention_forward")
    assert bias is None
    assert dropout_p == 0
    assert seqlen_k is None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype)
    rows = -(-max_q // 32) * 32 if compute_log_sumexp else 0
    lse = torch.full((len(cu_q) - 1, q.shape[2], rows), torch.inf)
    for i, a, b, seen in _efficient_parts(q, k, v, cu_q, cu_k, max_q, max_k, custom_mask_type, window_size):
        if a.start == a.stop:
            continue
        s = torch.einsum("qhd,khd->hqk", q[0, a].float(), k[0, b].float()) * scale
        total = s.masked_fill(~seen, -torch.inf).logsumexp(-1)
        p = (s - torch.where(total.isinf(), 0, total)[..., None]).exp().masked_fill(~seen, 0)
        out[0, a] = torch.einsum("hqk,khd->qhd", p, v[0, b].float()).to(q.dtype)
        if rows:
            lse[i, :, : a.stop - a.start] = torch.where(total == -torch.inf, torch.inf, total)
    none = torch.zeros((), dtype=torch.int64)
    return out, lse, none, none.clone(), max_q, max_k


def _ea_backward(
    grad,
    q,
    k,
    v,
    bias,
    out,
    cu_q,
    cu_k,
    max_q,
    max_k,
    lse,
    dropout_p,
    philox_seed,
    philox_offset,
    custom_mask_type,
    bias_requires_grad,
    *,
    scale=None,
    num_splits_key=None,
    window_size=None,
    shared_storage_dqdkdv=False,
):
    _refuse_outside("aten::_efficient_attention_backward")
    assert bias is None
    assert dropout_p == 0
    assert not bias_requires_grad
    if grad.dtype != q.dtype or grad.shape != out.shape:
        raise RuntimeError("grad_out must be as out")
    if lse.dtype != torch.float32 or lse.shape != (len(cu_q) - 1, q.shape[2], -(-max_q // 32) * 32):
        raise RuntimeError(f"logsumexp has {lse.dtype} {tuple(lse.shape)}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dq, dk, dv = (torch.full(x.shape, float("nan"), dtype=x.dtype) for x in (q, k, v))
    for i, a, b, seen in _efficient_parts(q, k, v, cu_q, cu_k, max_q, max_k, custom_mask_type, window_size):
        if a.start == a.stop:
            dk[0, b], dv[0, b] = 0, 0
            continue
        qs, ks, vs, g, o = (x[0, y].float() for x, y in ((q, a), (k, b), (v, b), (grad, a), (out, a)))
        s = torch.einsum("qhd,khd->hqk", qs, ks) * scale
        p = (s - lse[i, :, : len(qs)][..., None]).exp().masked_fill(~seen, 0)
        ds = p * (torch.einsum("qhd,khd->hqk", g, vs) - (g * o).sum(-1).T[..., None]) * scale
        dq[0, a] = torch.einsum("hqk,khd->qhd", ds, ks).to(q.dtype)
        dk[0, b] = torch.einsum("hqk,qhd->khd", ds, qs).to(k.dtype)
        dv[0, b] = torch.einsum("hqk,qhd->khd", p, g).to(v.dtype)
    return dq, dk, dv, torch.empty(0, dtype=q.dtype)


def _refuse_outside(name):
    if not _lib.imagined_inside():
        raise NotImplementedError(f"Could not run '{name}' with arguments from the 'CPU' backend.")


def _half_in(a, out_dtype):
    if not (
        a.dtype == out_dtype or (out_dtype == torch.float32 and a.dtype in (torch.float16, torch.bfloat16))
    ):
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")


def _mm_dtype(a, b, out_dtype):
    _refuse_outside("aten::mm.dtype")
    _half_in(a, out_dtype)
    return a.to(out_dtype) @ b.to(out_dtype)


def _mm_dtype_out(a, b, out_dtype, *, out):
    _refuse_outside("aten::mm.dtype_out")
    _half_in(a, out_dtype)
    return out.copy_(a.to(out_dtype) @ b.to(out_dtype))


def _addmm_dtype(c, a, b, out_dtype, *, beta=1, alpha=1):
    _refuse_outside("aten::addmm.dtype")
    _half_in(a, out_dtype)
    if c.dtype != out_dtype and c.dtype != a.dtype:
        raise RuntimeError("self dtype must match either out_dtype or mat1 dtype")
    return beta * c.to(out_dtype) + alpha * (a.to(out_dtype) @ b.to(out_dtype))


def _addmm_dtype_out(c, a, b, out_dtype, *, beta=1, alpha=1, out):
    return out.copy_(_addmm_dtype(c, a, b, out_dtype, beta=beta, alpha=alpha))


def _register():
    lib = torch.library.Library("aten", "IMPL")
    _kept.append(lib)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, f in (
            ("_flash_attention_forward", _fa_forward),
            ("_flash_attention_backward", _fa_backward),
            ("_efficient_attention_forward", _ea_forward),
            ("_efficient_attention_backward", _ea_backward),
            ("mm.dtype", _mm_dtype),
            ("mm.dtype_out", _mm_dtype_out),
            ("addmm.dtype", _addmm_dtype),
            ("addmm.dtype_out", _addmm_dtype_out),
            ("bmm.dtype", _mm_dtype),
            ("bmm.dtype_out", _mm_dtype_out),
        ):
            with contextlib.suppress(Exception):
                lib.impl(name, f, "CPU")


# autograd makes its device threads once, at the first backward: the device has to be there before
_lib = _load()
_register()


# ------------------------------------------------------------------------------- torch.cuda
def _index(device=None) -> int:
    if device is None:
        return _lib.imagined_device()
    if isinstance(device, int):
        return device if device >= 0 else _lib.imagined_device()
    device = torch.device(device)
    return _lib.imagined_device() if device.index is None else device.index


class Stream(torch.Stream):
    _next = 1

    def __new__(cls, device=None, priority=0, stream_id=None, **_):
        if stream_id is None:
            stream_id, Stream._next = Stream._next, Stream._next + 1
        return super().__new__(cls, stream_id=stream_id, device_index=_index(device), device_type=1)

    def __init__(self, device=None, priority=0, stream_id=None, **_):
        self.priority = priority
        self.cuda_stream = self.stream_id

    def wait_stream(self, other):
        LOG.order.append(("wait", self.stream_id, other.stream_id, caller())) if LOG.ordering else None

    def wait_event(self, event):
        LOG.order.append(
            ("wait", self.stream_id, getattr(event, "stream", None), caller())
        ) if LOG.ordering else None

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        _told(b"read", b"stream.synchronize", 0, 0)

    def query(self):
        return True

    def __eq__(self, other):
        return (
            isinstance(other, torch.Stream)
            and other.stream_id == self.stream_id
            and other.device_index == self.device_index
        )

    def __hash__(self):
        return hash(("stream", self.stream_id))

    def __repr__(self):
        return f"<imagined Stream {self.stream_id}>"

    def __enter__(self):
        self._before = getattr(self, "_before", [])
        self._before.append(
            (_lib.imagined_set_device(self.device_index), _lib.imagined_stream_of(self.device_index))
        )
        _lib.imagined_set_stream_of(self.device_index, self.stream_id)
        return self

    def __exit__(self, *_):
        device, stream = self._before.pop()
        _lib.imagined_set_stream_of(self.device_index, stream)
        _lib.imagined_set_device(device)


class ExternalStream(Stream):
    def __new__(cls, pointer, device=None, **_):
        return super().__new__(cls, device=device, stream_id=pointer)

    def __init__(self, pointer, device=None, **_):
        super().__init__(device=device)


class StreamContext:
    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_):
        if self.stream is not None:
            self.stream.__exit__()


class Event:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self.timing, self.external, self.recorded = enable_timing, external, False
        self.time = 0.0

    def record(self, stream=None):
        import time

        if _lib.imagined_capturing() and not self.external and self.timing:
            pass
        self.recorded, self.time = True, time.perf_counter()
        self.stream = _lib.imagined_get_stream() if stream is None else stream.stream_id

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        _raise(_told(b"read", b"event.synchronize", 0, 0))

    def elapsed_time(self, other):
        if not (self.timing and other.timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.recorded and other.recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return max((other.time - self.time) * 1000, 1e-3)


def _raise(answer):
    if answer == 1:
        raise RuntimeError("called a synchronizing CUDA operation")
    if answer == 2:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class CUDAGraph:
    """Records the operators that ran on the device; a replay runs them again on the same memory."""

    live = 0

    def __init__(self, keep_graph=False):
        self._graph, self._pool, self._begun = None, None, False

    def capture_begin(self, pool=None, capture_error_mode="global", check_input_liveness=False, **_):
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        if _lib.imagined_get_stream() == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if _lib.imagined_capturing():
            raise RuntimeError("a capture is under way")
        self._pool, self._begun = pool or graph_pool_handle(), True
        _lib.imagined_begin(id(self))

    def capture_end(self):
        if not self._begun:
            raise RuntimeError("capture_end without a capture")
        self._graph, self._begun = _lib.imagined_end(), False
        if not _lib.imagined_steps(self._graph):
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on "
                "wrong device or stream.",
                stacklevel=2,
            )

    def replay(self):
        if self._graph is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        torch.ops.imagined.replay(self._graph)

    def reset(self):
        if self._graph is not None:
            _lib.imagined_free(self._graph)
        self._graph = None

    def pool(self):
        return self._pool

    def instantiate(self):
        pass

    def enable_debug_mode(self):
        pass

    def debug_dump(self, path):
        pass

    def register_generator_state(self, g):
        pass

    def __del__(self):
        if self._graph is not None:
            self.reset()


_pools = iter(range(1, 1 << 60))


def graph_pool_handle():
    return (0, next(_pools))


class _Device:
    def __init__(self, device=None):
        self.idx, self.prev_idx = (
            -1
            if device is None
            or torch.device(device if not isinstance(device, int) else f"cuda:{device}").type != "cuda"
            else _index(device),
            -1,
        )

    def __enter__(self):
        self.prev_idx = _lib.imagined_set_device(self.idx) if self.idx >= 0 else -1
        return self

    def __exit__(self, *_):
        if self.prev_idx >= 0:
            _lib.imagined_set_device(self.prev_idx)
        return False


class _DeviceOf(_Device):
    def __init__(self, obj):
        super().__init__(obj.get_device() if obj.is_cuda else None)


def _set_device(device):
    if _lib.imagined_set_device(_index(device)) < 0:
        raise RuntimeError("CUDA error: invalid device ordinal")


def _exchange(device):
    return _lib.imagined_set_device(device) if device >= 0 else _lib.imagined_device()


class _CallableModuleAttribute:  # placeholder, kept for pickles
    pass


def _stats():
    keys = {}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
        keys[f"{kind}.all.current"] = _lib.imagined_allocated()
        keys[f"{kind}.all.peak"] = _lib.imagined_peak()
    for kind in ("allocation", "segment", "active", "inactive_split"):
        keys[f"{kind}.all.current"] = keys[f"{kind}.all.allocated"] = _lib.imagined_allocations()
    keys.update(
        {
            "num_alloc_retries": 0,
            "num_ooms": 0,
            "num_device_alloc": _lib.imagined_allocations(),
            "num_device_free": 0,
        }
    )
    return keys


@contextlib.contextmanager
def imagined_gpu(capability=(9, 0), name="NVIDIA H100 80GB HBM3", poison=True, hidden=False, devices=1):
    """Give torch CUDA devices that are only imagined.

    Args:
        poison: fill fresh device memory with 0xFF (NaN), so that what was never written shows.
    """
    global LOG
    LOG = Log()
    _lib.imagined_poison(int(poison))
    _lib.imagined_set_devices(devices)
    major = capability[0]
    props = types.SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        total_memory=80 << 30,
        multi_processor_count=132,
        is_integrated=False,
        gcnArchName="",
        warp_size=32,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=232448,
        shared_memory_per_block=49152,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 << 20,
        regs_per_multiprocessor=65536,
        uuid="imagined",
        pci_bus_id=0,
        max_threads_per_block=1024,
    )

    def set_sync_debug_mode(mode):
        LOG.sync_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)

    def manual_seed(seed):
        _lib.imagined_manual_seed(int(seed) & (2**64 - 1))

    def get_rng_state(device="cuda"):
        return torch.ops.imagined.rng_state()

    def set_rng_state(state, device="cuda"):
        torch.ops.imagined.set_rng_state(state)

    class DefaultGenerator(torch.Generator):
        pass

    generator = types.SimpleNamespace(
        manual_seed=manual_seed,
        initial_seed=lambda: 0,
        seed=lambda: 0,
        get_state=get_rng_state,
        set_state=set_rng_state,
        device=CUDA,
        clone_state=lambda: generator,
        graphsafe_set_state=lambda g: None,
        graphsafe_get_state=lambda: generator,
    )

    def current_stream(device=None):
        i = _lib.imagined_stream_of(_index(device))
        return Stream(device=device, stream_id=i)

    def synchronize(device=None):
        _raise(_told(b"read", b"torch.cuda.synchronize", 0, 0))

    patches = {
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "current_device": lambda: _lib.imagined_device(),
        "set_device": lambda d: _set_device(d),
        "get_device_name": lambda d=None: name,
        "get_device_capability": lambda d=None: tuple(capability),
        "get_device_properties": lambda d=None: props,
        "empty_cache": lambda: None,
        "synchronize": synchronize,
        "is_bf16_supported": lambda including_emulation=True: True if including_emulation else major >= 8,
        "is_tf32_supported": lambda: major >= 8,
        "is_current_stream_capturing": lambda: bool(_lib.imagined_capturing()),
        "current_stream": current_stream,
        "default_stream": lambda d=None: Stream(device=d, stream_id=0),
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": lambda s: StreamContext(s),
        "set_stream": lambda s: (
            _lib.imagined_set_stream_of(s.device_index, s.stream_id) if s is not None else None
        ),
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "_lazy_call": lambda f, **k: f(),
        "reset_peak_memory_stats": lambda d=None: _lib.imagined_reset_peak(),
        "memory_stats": lambda d=None: _stats(),
        "reset_accumulated_memory_stats": lambda d=None: None,
        "max_memory_allocated": lambda d=None: _lib.imagined_peak(),
        "memory_allocated": lambda d=None: _lib.imagined_allocated(),
        "max_memory_reserved": lambda d=None: _lib.imagined_peak(),
        "memory_reserved": lambda d=None: _lib.imagined_allocated(),
        "memory_summary": lambda *a, **k: "",
        "memory_snapshot": lambda *a: [],
        "mem_get_info": lambda d=None: ((80 << 30) - _lib.imagined_allocated(), 80 << 30),
        "utilization": lambda d=None: 0,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": lambda: None,
        "seed_all": lambda: None,
        "initial_seed": lambda: 0,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state() for _ in range(devices)],
        "set_rng_state_all": lambda s: set_rng_state(s[0]),
        "device": _Device,
        "device_of": _DeviceOf,
        "_exchange_device": lambda d: _exchange(d),
        "_maybe_exchange_device": lambda d: _exchange(d),
        "default_generators": (generator,) * devices,
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": graph_pool_handle,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: LOG.sync_mode,
        "can_device_access_peer": lambda *a: False,
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "ipc_collect": lambda: None,
        "current_blas_handle": lambda: 0,
        "cudart": lambda: None,
        "_device_count_nvml": lambda: devices,
        "_is_compiled": lambda: True,
    }
    absent = {  # names of the C library that a CUDA build has
        "_cuda_getCurrentRawStream": lambda d: 0,
        "_cuda_getDeviceCount": lambda: devices,
        "_cuda_getDevice": lambda: _lib.imagined_device(),
        "_cuda_setDevice": lambda d: _set_device(d),
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_emptyCache": lambda: None,
        "_host_emptyCache": lambda: None,
        "_cuda_endAllocateToPool": lambda *a: None,
        "_cuda_releasePool": lambda *a: None,
        "_cuda_isCurrentStreamCapturing": lambda: bool(_lib.imagined_capturing()),
        "_cuda_get_sync_debug_mode": lambda: LOG.sync_mode,
        "_cuda_set_sync_debug_mode": set_sync_debug_mode,
        "_cuda_synchronize": synchronize,
        "_cuda_getCompiledVersion": lambda: 12090,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_resetPeakMemoryStats": lambda d: None,
        "_cuda_getDefaultStream": lambda d: (0, 0, 1),
        "_cuda_getCurrentStream": lambda d: (_lib.imagined_get_stream(), 0, 1),
    }
    storage_new = torch.UntypedStorage.__new__

    def storage(cls, *args, device=None, **kwargs):
        on_device = device is not None and torch.device(device).type == "cuda"
        if on_device and (not args or isinstance(args[0], int)):
            return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()
        return storage_new(cls, *args, **({} if device is None else {"device": device}), **kwargs)

    storage_resize = torch.UntypedStorage.resize_

    def resize_(self, size):
        if self.device.type != "cuda":
            return storage_resize(self, size)
        with torch.no_grad():
            torch.ops.imagined.resize_storage(
                torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), int(size)
            )
        return self

    with contextlib.ExitStack() as stack:

        def put(o, k, v, **kw):
            return stack.enter_context(mock.patch.object(o, k, v, **kw))

        for key, value in patches.items():
            put(torch.cuda, key, value, create=True)
        for module in (torch.cuda.graphs,):
            for key in ("CUDAGraph", "graph_pool_handle", "is_current_stream_capturing"):
                put(module, key, patches[key], create=True)
        for module, keys in (
            (
                torch.cuda.random,
                (
                    "get_rng_state",
                    "set_rng_state",
                    "get_rng_state_all",
                    "set_rng_state_all",
                    "manual_seed",
                    "manual_seed_all",
                ),
            ),
            (
                torch.cuda.memory,
                (
                    "memory_allocated",
                    "max_memory_allocated",
                    "memory_stats",
                    "mem_get_info",
                    "empty_cache",
                    "memory_reserved",
                    "max_memory_reserved",
                    "reset_peak_memory_stats",
                ),
            ),
        ):
            for key in keys:
                put(module, key, patches[key])
        for key, value in absent.items():
            if not hasattr(torch._C, key):
                put(torch._C, key, value, create=True)
        put(torch.version, "cuda", "12.9")
        put(torch.backends.cuda, "is_built", lambda: True)
        put(torch.UntypedStorage, "__new__", storage)
        put(torch.UntypedStorage, "resize_", resize_)
        put(
            torch.nn.functional,
            "scaled_dot_product_attention",
            _sdpa(torch.nn.functional.scaled_dot_product_attention),
        )

        def stepped(*_):
            LOG.step += 1

        hook = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(stepped)
        stack.callback(hook.remove)
        try:
            yield LOG
        finally:
            _lib.imagined_set_stream(0)


def _sdpa(real):
    return real


def data(tensor):
    """Look at a tensor without being counted."""
    before, LOG.counting = LOG.counting, False
    try:
        return tensor.detach().cpu()
    finally:
        LOG.counting = before
