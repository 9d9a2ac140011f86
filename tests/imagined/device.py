"""A GPU that is only imagined: tensors of a CPU build of torch that say "cuda:0" and refuse mixed devices.

``with imagined_gpu(capability=(9, 0)) as log``: ``log.reads`` is (operator, caller),
``log.uploads`` is (operator, bytes, pinned, non_blocking, caller). See README.md.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import sys
import threading
import time
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


class Log:
    """What the host asked of the device: reads and uploads, each with its caller and optimizer step."""

    def __init__(self):
        self.reads = []
        self.uploads = []
        self.read_steps = []
        self.upload_steps = []
        self.counting = True
        self.sync_mode = 0
        self.step = 0

    def clear(self):
        for x in (self.reads, self.uploads, self.read_steps, self.upload_steps):
            x.clear()


LOG = Log()


_OURS = "/lightning_thd/"
_LIBRARIES = ("/site-packages/lightning", "/transformers/", "/accelerate/", "/trl/", "/torchao/")
_SCRIPTS = ("/tests/", "/benchmarks/", "/examples/", "<string>", "<stdin>")


def _frames() -> list[tuple[str, str]]:
    """Return file, and line with function, of every frame outside of this folder, the innermost first."""
    frames = []
    frame = sys._getframe(2)

    while frame is not None:
        if "/imagined" not in frame.f_code.co_filename:
            frames.append((frame.f_code.co_filename, f"{frame.f_lineno} {frame.f_code.co_name}"))
        frame = frame.f_back

    return frames


def _nearest(frames: list[tuple[str, str]]) -> str:
    """Return file, line and function of the nearest frame of ours, else of a library's, else of a test's."""
    for places in ((_OURS,), _LIBRARIES, _SCRIPTS, ("",)):
        for name, line in frames:
            if any(place in name for place in places):
                return f"{_short(name)}:{line}"

    return "backward" if threading.current_thread() is not threading.main_thread() else "?"


def _short(name: str) -> str:
    _, ours, path = name.rpartition(_OURS)
    return path if ours else "/".join(name.split("/")[-3:])


def caller() -> str:
    """Return file, line and function of the nearest frame of ours, else of a library's, else of a test's."""
    return _nearest(_frames())


def _reader() -> str:
    """Return ``caller()``, with " > " and the library's frame if that library has read below ours."""
    frames = _frames()
    nearest = _nearest(frames)

    for name, line in frames:
        if _OURS in name:
            return nearest
        if any(place in name for place in _LIBRARIES):
            library = f"{_short(name)}:{line}"
            return nearest if nearest == library else f"{nearest} > {library}"

    return nearest


def _told(kind, name, size, flags):
    """Note a read or an upload; 1 makes the caller raise as where waiting is an error, 2 as in a capture."""
    try:
        kind = kind.decode()
        name = name.decode()
        if not LOG.counting or kind not in ("read", "upload"):
            return 0

        pinned = bool(flags & 1)
        free = bool(flags & 2)

        if kind == "read":
            LOG.reads.append((name.removeprefix("aten::"), _reader()))
            LOG.read_steps.append(LOG.step)
            waits = forbidden = "not waiting" not in name
        else:
            LOG.uploads.append((name.removeprefix("aten::"), size, pinned, free, caller()))
            LOG.upload_steps.append(LOG.step)
            waits = not free
            forbidden = not pinned

        return 2 if forbidden and _lib.imagined_capturing() else int(waits and LOG.sync_mode == 2)
    except BaseException:  # nothing may leave a callback
        return 0


def compiled(name: str, *options: str) -> Path:
    """Compile a source of this folder, once for all processes, and return the library."""
    source = HERE / f"{name}.cpp"
    root = Path(torch.__file__).parent
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    out = BUILT / f"imagined_{name}_{key}.so"
    BUILT.mkdir(parents=True, exist_ok=True)

    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            part = out.with_suffix(f".{os.getpid()}.part")
            command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++20", "-w", f"-I{root}/include"]
            command += [f"-I{root}/include/torch/csrc/api/include", *options, str(source), f"-L{root}/lib"]
            command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{root}/lib"]
            subprocess.run([*command, "-o", str(part)], check=True)
            part.rename(out)

    return out


def _load():
    lib = ctypes.CDLL(str(compiled("device")))
    for name in ("allocated", "peak", "allocations", "steps", "get_stream", "stream_of"):
        getattr(lib, f"imagined_{name}").restype = ctypes.c_int64
    lib.imagined_set_stream.argtypes = lib.imagined_begin.argtypes = [ctypes.c_int64]
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
def _demand(holds, what):
    if not holds:
        raise RuntimeError(what)


def _outside(name):
    if not _lib.imagined_inside():
        raise NotImplementedError(f"Could not run 'aten::{name}' with arguments from the 'CPU' backend.")


def _scores(q, k, scale, seen):
    """Return scores [H, Q, K] of one sequence, with heads of keys repeated, and -inf where a mask hides."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)


def _attend(q, k, v, scale, seen):
    """Return one sequence's output and logsumexp [H, Q], +inf for rows that see nothing."""
    q = q.float()
    k = k.float()
    v = v.float()
    scores = _scores(q, k, scale, seen)
    total = scores.logsumexp(-1)
    p = (scores - torch.where(total.isinf(), 0, total)[..., None]).exp()
    out = torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(q.shape[1] // v.shape[1], 1))
    return out, torch.where(total == -torch.inf, torch.inf, total)


def _attend_backward(grad, q, k, v, out, lse, scale, seen):
    """Return the gradients of one sequence's queries, keys and values."""
    grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    repeated = k.repeat_interleave(heads[1], 1)
    values = v.repeat_interleave(heads[1], 1)
    p = (_scores(q, k, scale, seen) - lse[..., None]).exp()
    dp = torch.einsum("qhd,khd->hqk", grad, values)
    ds = p * (dp - (grad * out).sum(-1).T[..., None]) * scale
    dk = torch.einsum("hqk,qhd->khd", ds, q).unflatten(1, heads).sum(2)
    dv = torch.einsum("hqk,qhd->khd", p, grad).unflatten(1, heads).sum(2)
    return torch.einsum("hqk,khd->qhd", ds, repeated), dk, dv


def _sequences(cu_seqlens_q, cu_seqlens_k):
    for i in range(len(cu_seqlens_q) - 1):
        yield (
            i,
            slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1])),
            slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1])),
        )


def _flash_parts(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal, left, right):
    """Check what CUDA's flash kernel checks, then give slices and mask of each sequence."""
    half = q.dtype in (torch.float16, torch.bfloat16) or os.environ.get("IMAGINED_FLASH_FP32")
    _demand(half, "FlashAttention only support fp16 and bf16 data type")
    _demand(q.dtype == k.dtype == v.dtype, "query and key must have the same dtype")
    _demand(cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32, "cu_seqlens_q must have dtype int32")
    _demand(all(x.stride(-1) == 1 for x in (q, k, v)), "Input tensor must have contiguous last dimension")
    _demand(cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous(), "cu_seqlens_q must be contiguous")
    size = q.shape[-1]
    _demand(size <= 256 and size % 8 == 0 and size == v.shape[-1], f"head dimension {size}, {v.shape[-1]}")
    _demand(q.shape[1] % k.shape[1] == 0, "Number of heads in key/value must divide number of heads in query")

    for cu, most, slots in ((cu_seqlens_q, max_q, q.shape[0]), (cu_seqlens_k, max_k, k.shape[0])):
        lengths = cu.diff().tolist()
        assert min(lengths, default=0) >= 0, f"imagined CUDA: cu_seqlens falls: {cu.tolist()[:20]}"
        assert max(lengths, default=0) <= most, f"imagined CUDA: max_seqlen={most} is below the longest"
        assert int(cu[-1]) <= slots, "imagined CUDA: cu_seqlens reach beyond the tokens"

    for _, a, b in _sequences(cu_seqlens_q, cu_seqlens_k):
        n = a.stop - a.start
        m = b.stop - b.start
        away = torch.arange(m)[None] - torch.arange(n)[:, None] - m + n  # of a key from its query
        seen = torch.ones(n, m, dtype=torch.bool)
        if left is not None and left >= 0:
            seen &= away >= -left
        if causal or (right is not None and right >= 0):
            seen &= away <= (0 if causal else right)
        yield a, b, seen


def _fa_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    debug_mask,
    *,
    scale=None,
    **others,
):
    _outside("_flash_attention_forward")
    left = others.pop("window_size_left", None)
    right = others.pop("window_size_right", None)

    assert not any(value is not None for value in others.values())
    assert dropout_p == 0

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # The kernel writes no token outside of the sequences.
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"), dtype=torch.float32)

    for a, b, seen in _flash_parts(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, is_causal, left, right):
        if a.start < a.stop:
            attended, lse[:, a] = _attend(q[a], k[b], v[b], scale, seen)
            out[a] = attended.to(q.dtype)

    none = torch.zeros((), dtype=torch.uint64)
    return out, lse, torch.zeros(2, dtype=torch.uint64), none, torch.empty(0, dtype=q.dtype)


def _fa_backward(
    grad, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout_p, is_causal, rng, unused,
    scale=None, **windows,
):  # fmt: skip
    _outside("_flash_attention_backward")
    _demand(grad.dtype == q.dtype == out.dtype, "query and dout must have the same dtype")
    _demand(lse.dtype == torch.float32 and lse.shape == (q.shape[1], q.shape[0]), f"softmax_lse {lse.shape}")
    left = windows.get("window_size_left")
    right = windows.get("window_size_right")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dq, dk, dv = (torch.full(x.shape, float("nan"), dtype=x.dtype) for x in (q, k, v))
    for a, b, seen in _flash_parts(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, is_causal, left, right):
        gradients = _attend_backward(grad[a], q[a], k[b], v[b], out[a], lse[:, a], scale, seen)
        dq[a], dk[b], dv[b] = (x.to(q.dtype) for x in gradients)
    return dq, dk, dv


def _efficient_parts(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, mask_type, window):
    """Check what CUDA's memory-efficient kernel checks, then give slices and mask of each sequence."""
    _demand(q.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0] == 1, "cu_seqlen only supports batch 1")
    alike = q.shape[2] == k.shape[2] == v.shape[2] and q.shape[3] == k.shape[3]
    _demand(alike, "Query/Key/Value should have one number of heads, and query and key one head size")
    takes_dtype = q.dtype in (torch.float32, torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype
    _demand(takes_dtype, f"Only fp32, half & bf16 supported, got {q.dtype}")
    new = q.dtype != torch.bfloat16 or torch.cuda.get_device_capability() >= (8, 0)
    _demand(new, "bfloat16 is only supported on sm80+ here")

    for x in (cu_seqlens_q, cu_seqlens_k):
        fits = x is not None and x.dtype == torch.int32 and x.dim() == 1 and x.is_contiguous()
        _demand(fits, "cu_seqlens must be given, int32, contiguous")

    has_longest = len(cu_seqlens_q) == len(cu_seqlens_k) and max_q is not None and max_k is not None
    _demand(has_longest, "cu_seqlens_q and cu_seqlens_k must have one length, and both longest be given")
    _demand(all(x.stride(-1) == 1 for x in (q, k, v)), "the last dimension must be contiguous")
    windowed = window is not None and window > 0
    _demand(not windowed or mask_type, "window_size is used with causal masks only")

    for i, a, b in _sequences(cu_seqlens_q, cu_seqlens_k):
        n = a.stop - a.start
        m = b.stop - b.start
        _demand(n <= max_q and m <= max_k, "a sequence is longer than max_seqlen: rows would stay unwritten")
        row = torch.arange(n)[:, None] + (m - n if mask_type == 2 else 0)
        col = torch.arange(m)[None]
        seen = torch.ones(n, m, dtype=torch.bool) if mask_type == 0 else col <= row
        yield i, a, b, seen & (col > row - window) if windowed else seen


def _ea_forward(
    q,
    k,
    v,
    bias,
    cu_seqlens_q,
    cu_seqlens_k,
    max_q,
    max_k,
    dropout_p,
    mask,
    with_lse=False,
    *,
    scale=None,
    **others,
):
    _outside("_efficient_attention_forward")
    window = others.pop("window_size", None)
    assert bias is None
    assert dropout_p == 0
    assert others.get("seqlen_k") is None

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype)
    rows = -(-max_q // 32) * 32 if with_lse else 0
    lse = torch.full((len(cu_seqlens_q) - 1, q.shape[2], rows), torch.inf)

    for i, a, b, seen in _efficient_parts(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, mask, window):
        if a.start < a.stop:
            attended, total = _attend(q[0, a], k[0, b], v[0, b], scale, seen)
            out[0, a] = attended.to(q.dtype)
            if rows:
                lse[i, :, : a.stop - a.start] = total

    none = torch.zeros((), dtype=torch.int64)
    return out, lse, none, none.clone(), max_q, max_k


def _ea_backward(
    grad,
    q,
    k,
    v,
    bias,
    out,
    cu_seqlens_q,
    cu_seqlens_k,
    max_q,
    max_k,
    lse,
    dropout_p,
    *given,
    scale=None,
    **o,
):
    _outside("_efficient_attention_backward")
    *_, mask, bias_requires_grad = given
    assert bias is None
    assert dropout_p == 0
    assert not bias_requires_grad

    _demand(grad.dtype == q.dtype and grad.shape == out.shape, "grad_out must be as out")
    fits = lse.dtype == torch.float32 and lse.shape == (
        len(cu_seqlens_q) - 1,
        q.shape[2],
        -(-max_q // 32) * 32,
    )
    _demand(fits, f"logsumexp has {lse.dtype} {tuple(lse.shape)}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dq, dk, dv = (torch.full(x.shape, float("nan"), dtype=x.dtype) for x in (q, k, v))
    parts = _efficient_parts(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, mask, o.get("window_size"))

    for i, a, b, seen in parts:
        here = (grad[0, a], q[0, a], k[0, b], v[0, b], out[0, a], lse[i, :, : a.stop - a.start])
        dq[0, a], dk[0, b], dv[0, b] = (x.to(q.dtype) for x in _attend_backward(*here, scale, seen))

    return dq, dk, dv, torch.empty(0, dtype=q.dtype)


def _mm_dtype(a, b, out_dtype):
    _outside("mm.dtype")
    wider = out_dtype == torch.float32 and a.dtype in (torch.float16, torch.bfloat16)
    _demand(a.dtype == out_dtype or wider, "out_dtype must be the input's dtype, or fp32 for halves")
    return a.to(out_dtype) @ b.to(out_dtype)


def _mm_dtype_out(a, b, out_dtype, *, out):
    return out.copy_(_mm_dtype(a, b, out_dtype))


def _addmm_dtype_out(total, a, b, out_dtype, *, beta=1, alpha=1, out):
    _demand(total.dtype in (out_dtype, a.dtype), "self must have out_dtype or the dtype of mat1")
    product = alpha * _mm_dtype(a, b, out_dtype)
    return out.copy_(beta * total + product if beta else product)  # 0 does not read the total, as in cuBLAS


def _unseen(kernel):
    """Hide a kernel's products from modes of torch functions, which do not see into CUDA's kernels."""

    @functools.wraps(kernel)
    def run(*args, **kwargs):
        with torch._C.DisableTorchFunction():
            return kernel(*args, **kwargs)

    return run


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
            ("addmm.dtype_out", _addmm_dtype_out),
        ):
            with contextlib.suppress(Exception):
                lib.impl(name, _unseen(f), "CPU")


# autograd makes its device threads once, at the first backward: the device has to be there before
_lib = _load()
_register()


# ------------------------------------------------------------------------------- torch.cuda
def _index(device=None) -> int:
    if isinstance(device, int):
        return device if device >= 0 else _lib.imagined_device()
    index = None if device is None else torch.device(device).index
    return _lib.imagined_device() if index is None else index


class Stream(torch.Stream):
    _next = 1

    def __new__(cls, device=None, priority=0, stream_id=None, **_):
        if stream_id is None:
            stream_id = Stream._next
            Stream._next = Stream._next + 1
        return super().__new__(cls, stream_id=stream_id, device_index=_index(device), device_type=1)

    def __init__(self, device=None, priority=0, stream_id=None, **_):
        self.priority = priority
        self.cuda_stream = self.stream_id

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        _told(b"read", b"stream.synchronize", 0, 0)

    def query(self):
        return True

    def __eq__(self, other):
        same = isinstance(other, torch.Stream) and other.stream_id == self.stream_id
        return same and other.device_index == self.device_index

    def __hash__(self):
        return hash(("stream", self.stream_id))

    def __enter__(self):
        self._before = getattr(self, "_before", [])
        device = _lib.imagined_set_device(self.device_index)
        index = self.device_index
        self._before.append((device, _lib.imagined_stream_of(index)))
        _lib.imagined_set_stream_of(index, self.stream_id)
        return self

    def __exit__(self, *_):
        device, stream = self._before.pop()
        _lib.imagined_set_stream_of(self.device_index, stream)
        _lib.imagined_set_device(device)


class Event:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self.timing = enable_timing
        self.recorded = False
        self.time = 0.0

    def record(self, stream=None):
        self.recorded = True
        self.time = time.perf_counter()

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

    def __init__(self, keep_graph=False):
        self._graph = None
        self._pool = None
        self._begun = False

    def capture_begin(self, pool=None, capture_error_mode="global", check_input_liveness=False, **_):
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        _demand(_lib.imagined_get_stream(), "CUDA graphs must be captured on a non-default stream.")
        _demand(not _lib.imagined_capturing(), "a capture is under way")
        self._pool = pool or graph_pool_handle()
        self._begun = True
        _lib.imagined_begin(id(self))

    def capture_end(self):
        _demand(self._begun, "capture_end without a capture")
        self._graph = _lib.imagined_end()
        self._begun = False
        if not _lib.imagined_steps(self._graph):
            warnings.warn("The CUDA Graph is empty.", stacklevel=2)

    def replay(self):
        _demand(self._graph is not None, "Called CUDAGraph::replay without a preceding successful capture.")
        torch.ops.imagined.replay(self._graph)

    def reset(self):
        if self._graph is not None:
            _lib.imagined_free(self._graph)
        self._graph = None

    def pool(self):
        return self._pool

    def register_generator_state(self, g):
        pass

    def __del__(self):
        self.reset()


_pools = iter(range(1, 1 << 60))


def graph_pool_handle():
    return (0, next(_pools))


class _Device:
    def __init__(self, device=None):
        named = f"cuda:{device}" if isinstance(device, int) else device
        on_gpu = named is not None and torch.device(named).type == "cuda"
        self.idx = _index(device) if on_gpu else -1
        self.prev_idx = -1

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
    _demand(_lib.imagined_set_device(_index(device)) >= 0, "CUDA error: invalid device ordinal")


def _exchange(device):
    return _lib.imagined_set_device(device) if device >= 0 else _lib.imagined_device()


def _always(**values):
    """Return functions that take anything and return these values."""
    return {name: lambda *_, _value=value, **__: _value for name, value in values.items()}


@contextlib.contextmanager
def imagined_gpu(capability=(9, 0), name="NVIDIA H100 80GB HBM3", poison=True, devices=1):
    """Give torch CUDA devices that are only imagined.

    Args:
        poison: fill fresh device memory with 0xFF (NaN), so that what was never written shows.
    """
    global LOG
    LOG = Log()
    _lib.imagined_poison(int(poison))
    _lib.imagined_set_devices(devices)
    major, minor = capability
    props = types.SimpleNamespace(name=name, major=major, minor=minor, total_memory=80 << 30)
    props.multi_processor_count = 132
    props.warp_size = 32
    props.gcnArchName = ""
    props.uuid = "imagined"
    props.L2_cache_size = 50 << 20
    props.max_threads_per_multi_processor = 2048
    props.is_integrated = False

    def set_sync_debug_mode(mode):
        LOG.sync_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)

    def manual_seed(seed):
        _lib.imagined_manual_seed(int(seed) & (2**64 - 1))

    def get_rng_state(device="cuda"):
        return torch.ops.imagined.rng_state()

    def set_rng_state(state, device="cuda"):
        torch.ops.imagined.set_rng_state(state)

    clone = types.SimpleNamespace(device=CUDA, manual_seed=lambda seed: clone, get_state=get_rng_state)
    clone.set_state = lambda state: None
    generator = types.SimpleNamespace(
        manual_seed=lambda seed: [generator, manual_seed(seed)][0],
        get_state=get_rng_state,
        set_state=set_rng_state,
        device=CUDA,
        **_always(clone_state=clone, graphsafe_set_state=None, graphsafe_get_state=clone),
    )

    def current_stream(device=None):
        return Stream(device=device, stream_id=_lib.imagined_stream_of(_index(device)))

    def set_stream(stream):
        if stream is not None:
            _lib.imagined_set_stream_of(stream.device_index, stream.stream_id)

    def synchronize(device=None):
        _raise(_told(b"read", b"torch.cuda.synchronize", 0, 0))

    nothing = "empty_cache init _lazy_init reset_accumulated_memory_stats seed seed_all ipc_collect cudart"
    patches = {
        **_always(**dict.fromkeys(nothing.split())),
        **_always(is_available=True, is_initialized=True, _is_compiled=True, is_tf32_supported=major >= 8),
        **_always(
            device_count=devices,
            _device_count_nvml=devices,
            get_device_name=name,
            initial_seed=0,
            memory_stats={},
        ),
        **_always(get_device_capability=tuple(capability), get_device_properties=props, utilization=0),
        **_always(can_device_access_peer=False, get_arch_list=[f"sm_{major}{minor}"], memory_summary=""),
        "current_device": lambda: _lib.imagined_device(),
        "set_device": lambda d: _set_device(d),
        "synchronize": synchronize,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
        "is_current_stream_capturing": lambda: bool(_lib.imagined_capturing()),
        "current_stream": current_stream,
        "default_stream": lambda d=None: Stream(device=d, stream_id=0),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda s: contextlib.nullcontext() if s is None else s,
        "set_stream": set_stream,
        "_lazy_call": lambda f, **k: f(),
        "reset_peak_memory_stats": lambda d=None: _lib.imagined_reset_peak(),
        "max_memory_allocated": lambda d=None: _lib.imagined_peak(),
        "memory_allocated": lambda d=None: _lib.imagined_allocated(),
        "max_memory_reserved": lambda d=None: _lib.imagined_peak(),
        "memory_reserved": lambda d=None: _lib.imagined_allocated(),
        "mem_get_info": lambda d=None: ((80 << 30) - _lib.imagined_allocated(), 80 << 30),
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
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
    }
    idle = "emptyCache endAllocateToPool releasePool clearCublasWorkspaces resetPeakMemoryStats"
    absent = {  # names of the C library that a CUDA build has
        **_always(**dict.fromkeys([f"_cuda_{word}" for word in idle.split()]), _host_emptyCache=None),
        **_always(_cuda_getCurrentRawStream=0, _cuda_getDeviceCount=devices, _cuda_isInBadFork=False),
        **_always(_cuda_getArchFlags="sm_90", _cuda_getCompiledVersion=12090),
        **_always(_cuda_getDefaultStream=(0, 0, 1)),
        "_cuda_getDevice": lambda: _lib.imagined_device(),
        "_cuda_setDevice": lambda d: _set_device(d),
        "_cuda_isCurrentStreamCapturing": lambda: bool(_lib.imagined_capturing()),
        "_cuda_get_sync_debug_mode": lambda: LOG.sync_mode,
        "_cuda_set_sync_debug_mode": set_sync_debug_mode,
        "_cuda_synchronize": synchronize,
        "_cuda_getCurrentStream": lambda d: (_lib.imagined_get_stream(), 0, 1),
        **dict.fromkeys(("_cuda_CUDAAllocator_AllocatorState", "_set_cached_tensors_enabled"), object),
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
            whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
            torch.ops.imagined.resize_storage(whole, int(size))
        return self

    with contextlib.ExitStack() as stack:

        def put(o, k, v):
            return stack.enter_context(mock.patch.object(o, k, v, create=True))

        for key, value in patches.items():
            for module in (torch.cuda, torch.cuda.graphs, torch.cuda.random, torch.cuda.memory):
                if module is torch.cuda or hasattr(module, key):  # which has imported it by name
                    put(module, key, value)
        for key, value in absent.items():
            if not hasattr(torch._C, key):
                put(torch._C, key, value)
        put(torch.version, "cuda", "12.9")
        put(torch.backends.cuda, "is_built", lambda: True)
        put(torch.UntypedStorage, "__new__", storage)
        put(torch.UntypedStorage, "resize_", resize_)

        def stepped(*_):
            LOG.step += 1

        hook = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(stepped)
        stack.callback(hook.remove)
        try:
            yield LOG
        finally:
            _lib.imagined_set_stream(0)


def data(tensor):
    """Look at a tensor without being counted."""
    before = LOG.counting
    LOG.counting = False
    try:
        return tensor.detach().cpu()
    finally:
        LOG.counting = before
