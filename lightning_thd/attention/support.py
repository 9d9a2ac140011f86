"""The features of a call -> the first kernel that supports all, or an error with each kernel's reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd._imports import available, trouble
from lightning_thd._modes import MayNotCompare, may_compare_here
from lightning_thd._pages import see
from lightning_thd.attention import trial
from lightning_thd.attention.kernels import cpu, flash, portable, raw, torch_cuda
from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.flops.listen import unreported
from lightning_thd.warnings import THDWarning, warn

Backend = Literal["auto", "cpu", "torch", "flash", "te", "efficient", "portable"]
Kernel = Literal["cpu", "torch", "flash2", "flash3", "flash4", "te", "efficient", "portable"]

_HALF = (torch.float16, torch.bfloat16)
_ANY = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """One kernel and the features that it supports: dtypes, head sizes, softcap, sinks, devices."""

    backend: Backend  # the name with which a user selects it
    device: str = "cuda"  # the device type of its tensors: "cuda", "cpu" or "any"
    dtypes: tuple[torch.dtype, ...] = _HALF
    bf16_from: int = 0  # the lowest compute capability (major) with bf16
    sizes: Callable[[int, int], tuple[int, int] | None]  # (head size, value size) -> padded sizes, or None
    sizes_text: str
    softcap: bool = False
    # Compute capabilities (major) on which softcap limits the head size, and the largest head size there.
    softcap_to: tuple[tuple[int, ...], int] | None = None
    ahead: bool = True  # windows without a causal mask are supported
    sinks: str | None = "through lse"  # how sinks are applied; None if they are not supported
    lse: bool = True  # it returns lse, so partial results can be merged (context parallelism)
    deterministic: str = "with torch.use_deterministic_algorithms(True)"  # when gradients repeat exactly
    deterministic_to: int | None = None  # largest head size with a deterministic backward
    capability: tuple[int, ...] | None = None  # compute capabilities (major), None for any
    probe: str | None = None  # the module to import; None if torch is enough
    install: str = ""
    verified: bool = True  # it has run on a GPU; another is tried first, see ``trial``
    slow: bool = False  # most calls have a faster kernel, so a notice is printed once if "auto" chooses it


def _te_sizes(head_size: int, value_size: int) -> tuple[int, int] | None:
    """Return both head sizes unchanged if Transformer Engine runs them, else None."""
    if max(head_size, value_size) <= 256 and head_size % 8 == 0 and value_size % 8 == 0:
        return head_size, value_size
    return None


_TO_256 = "up to 256; both are padded to one multiple of 8"

SUPPORT: dict[Kernel, Support] = {
    "cpu": Support(
        backend="cpu",
        device="cpu",
        dtypes=_ANY,
        sizes=raw.any_size,
        sizes_text="any; the smaller of the two is padded",
        softcap=True,
        deterministic="always",
    ),
    "torch": Support(
        backend="torch",
        sizes=raw.one_size,
        sizes_text=_TO_256,
        capability=(8, 9, 10, 11, 12),
        probe="torch.nn.attention.varlen",
        install="pip install 'torch>=2.11'",
    ),
    "flash3": Support(
        backend="flash",
        sizes=raw.one_size,
        sizes_text=_TO_256,
        softcap=True,
        deterministic="with torch.use_deterministic_algorithms(True), head sizes up to 192",
        deterministic_to=192,
        capability=(9,),
        probe=flash.MODULES[3],
        verified=False,
        install="build the hopper folder of the flash-attention repository (flash-attn 3)",
    ),
    "flash4": Support(
        backend="flash",
        sizes=flash.Flash4().sizes,
        sizes_text="up to 128 each, (192, 128), (256, 256); others are padded to these",
        softcap=True,
        softcap_to=((10, 11), 192),
        capability=(9, 10, 11),
        probe=flash.MODULES[4],
        verified=False,
        install="pip install flash-attn-4",
    ),
    "flash2": Support(
        backend="flash",
        sizes=raw.one_size,
        sizes_text=_TO_256,
        softcap=True,
        capability=(8, 9, 10, 11, 12),
        probe=flash.MODULES[2],
        install="pip install --no-build-isolation flash-attn",
    ),
    "te": Support(
        backend="te",
        sizes=_te_sizes,
        sizes_text="multiples of 8 up to 256",
        sinks=None,
        lse=False,
        capability=(8, 9, 10, 12),
        probe="transformer_engine.pytorch",
        install="pip install --no-build-isolation 'transformer-engine[pytorch]'",
    ),
    "efficient": Support(
        backend="efficient",
        dtypes=(torch.float32, *_HALF),
        bf16_from=8,
        sizes=torch_cuda.AtenEfficient().sizes,
        sizes_text="any; padded to multiples of 8",
        ahead=False,
        capability=(5, 6, 7, 8, 9, 10, 11, 12),
        slow=True,
    ),
    "portable": Support(
        backend="portable",
        device="any",
        dtypes=_ANY,
        sizes=raw.any_size,
        sizes_text="any",
        softcap=True,
        slow=True,
    ),
}


# The kernels whose results ranks merge, and which gather keys or apply sinks; Transformer Engine does not.
RAW: dict[Kernel, raw.RawKernel] = {
    "cpu": cpu.CpuKernel(),
    "torch": torch_cuda.AtenFlash(),
    "flash2": flash.Flash2(),
    "flash3": flash.Flash3(),
    "flash4": flash.Flash4(),
    "efficient": torch_cuda.AtenEfficient(),
    "portable": portable.PortableKernel(),
}

# The order in which "auto" tries kernels, per compute capability, from published speeds. On Hopper,
# flash-attn 3 is 1.5 to 2.0 times as fast as flash-attn 2, which is also torch's kernel (Shah et al. 2024,
# arXiv:2407.08608).
_USUAL: tuple[Kernel, ...] = ("cpu", "torch", "flash2", "te", "flash3", "flash4", "efficient", "portable")
_FASTEST: dict[int, tuple[Kernel, ...]] = {
    9: ("flash3", "flash4", "torch", "flash2", "te", "efficient", "portable"),
    **dict.fromkeys((10, 11), ("flash4", "torch", "flash2", "te", "efficient", "portable")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The features of a call that decide which kernels can run it."""

    device: str
    dtype: torch.dtype
    head_size: int
    value_size: int
    spec: AttentionSpec
    sinks: bool = False
    needs_lse: bool = False
    deterministic: bool = False
    capability: int | None = None


_BACKENDS = ("auto", *dict.fromkeys(row.backend for row in SUPPORT.values()))
_CACHED = 256  # requests: models have few kinds of attention, but a test run has many


def check_backend(backend: object) -> None:
    """Raise if a user's choice is no backend."""
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is not known; choose one of {', '.join(_BACKENDS)}.")


def choose(backend: Backend, request: Request) -> Kernel:
    """Return the first kernel of a backend that runs a request; "auto" tries all, the fastest first.

    A kernel that never ran on a GPU for this package is passed over if its results are wrong here, and by
    "auto" also while it cannot be tried: in code that is compiled, captured or watched by a dispatch mode.
    """
    if backend != "auto":
        check_backend(backend)
    # torch.compile traces through caches, and warns of each.
    able = _able if torch.compiler.is_compiling() else _able_once
    for kernel in able(backend, request):
        row = SUPPORT[kernel]
        if not row.verified and not _passes_trial(kernel, request, backend):
            continue
        if row.slow and backend == "auto" and not torch.compiler.is_compiling():
            _notice_slow(kernel, request)
        return kernel

    raise ValueError(_reasons(backend, request))


def _able(backend: Backend, request: Request) -> tuple[Kernel, ...]:
    """Return the installed kernels of a backend that support a request, the fastest first."""
    kernels = []
    for kernel in _FASTEST.get(request.capability or 0, _USUAL):
        selected = backend in ("auto", SUPPORT[kernel].backend)
        if selected and why_not(kernel, request) is None and missing(kernel) is None:
            kernels.append(kernel)
    return tuple(kernels)


_able_once = lru_cache(maxsize=_CACHED)(_able)


def _reasons(backend: Backend, request: Request) -> str:
    """Return the error for a request that a backend cannot run, with a line for every kernel."""
    lines = [f"backend={backend!r} cannot run this call: {request}."]
    for kernel, row in SUPPORT.items():
        name = f"backend={row.backend!r}"
        if row.backend == "flash":  # three kernels have this backend
            name += f" ({kernel})"

        reason = why_not(kernel, request)
        install = missing(kernel)
        if reason is not None:
            lines.append(f"{name}: {reason}")
        elif install is not None:
            lines.append(f"{name}: would run it, but {install}")
        elif not row.verified and not _passes_trial(kernel, request, backend):
            lines.append(f"{name}: gives wrong results here, as a warning has said")
        else:
            lines.append(f"{name}: runs it")
    lines.append(see("kernels"))
    return "\n  ".join(lines)


def _notice_slow(kernel: Kernel, request: Request) -> None:
    """Print once that "auto" found only a slow kernel, with the precision that would be faster, if any."""
    capability = request.capability or 0
    faster_in_half = request.device == "cuda" and request.dtype == torch.float32 and capability >= 7
    _notice_once(kernel, capability if faster_in_half else 0)


@cache
def _notice_once(kernel: Kernel, capability: int) -> None:
    """Print that a kernel is slow; ``capability`` is 0 unless the GPU multiplies faster in half precision."""
    advice = ""
    if capability:
        half = "bf16-mixed" if capability >= 8 else "16-mixed"
        advice = f" This GPU multiplies faster with precision={half!r}."
    rank_zero_info(
        f"Attention runs on backend={kernel!r}: exact, and slower than a flash kernel. "
        f"`lightning-thd doctor` lists the kernels that this machine can run.{advice}"
    )


def _passes_trial(kernel: Kernel, request: Request, backend: Backend) -> bool:
    """Return whether a kernel that never ran on a GPU may run a request; if its trial fails, warn."""
    untried = backend != "auto"
    if torch.compiler.is_compiling():
        return untried
    try:
        return _trial(kernel, replace(request, needs_lse=False, sinks=False))
    except MayNotCompare:
        return untried


@lru_cache(maxsize=_CACHED)
def _trial(kernel: Kernel, request: Request) -> bool:
    """Try a kernel on a small pack, once for each kind of call, and say what came of it."""
    if not may_compare_here(_device(request)):
        raise MayNotCompare

    name = f"flash-attn {kernel[-1]}"
    sizes = (request.head_size, request.value_size)
    with unreported():
        found = trial.trouble(RAW[kernel], _device(request), request.dtype, sizes, request.spec)
    if found is None:
        _notice_tried(name)
        return True

    warn(
        f"Attention does not run on {name} here: of a small pack, {found}. The next kernel of "
        "`lightning-thd doctor` takes its place. This package has tested that release against a mock only: "
        f"please report what it printed. {see('kernels')}",
        THDWarning,
    )
    return False


@cache
def _notice_tried(name: str) -> None:
    """Print that a kernel runs which only its trial has shown to be right."""
    rank_zero_info(
        f"Attention runs on {name}, which this package had tested against a mock only. Here it has computed "
        "a small pack and its gradients as the portable kernel does. prepare(model, backend='torch') of "
        "lightning_thd.models, or an environment without that package, runs torch's own kernel."
    )


def _device(request: Request) -> torch.device:
    """Return the device on which a request is tried."""
    return torch.device(request.device)


def why_not(kernel: Kernel, request: Request) -> str | None:
    """Return why a kernel cannot run a request, or None; some kernels refuse further calls themselves."""
    row = SUPPORT[kernel]
    spec = request.spec

    if request.device != row.device and row.device != "any":
        return f"runs on {row.device} tensors, these are on {request.device}; move them .to({row.device!r})"
    if row.capability and request.capability is not None and request.capability not in row.capability:
        capabilities = " or ".join(map(str, row.capability))
        return f"needs compute capability {capabilities}, this GPU has {request.capability}"

    if request.dtype not in row.dtypes:
        dtypes = " or ".join(map(_name_of, row.dtypes))
        return f"takes {dtypes} (precision='bf16-mixed'), not {_name_of(request.dtype)}"
    capability = row.bf16_from if request.capability is None else request.capability
    if request.dtype == torch.bfloat16 and capability < row.bf16_from:
        return f"takes bfloat16 from compute capability {row.bf16_from} on, this GPU has {capability}"

    sizes = row.sizes(request.head_size, request.value_size)
    if sizes is None:
        return f"does not take head sizes ({request.head_size}, {request.value_size}); takes {row.sizes_text}"
    if spec.softcap and not row.softcap:
        return "has no softcap"
    if spec.softcap and row.softcap_to is not None:
        capabilities_with_limit, largest_size = row.softcap_to
        if request.capability in capabilities_with_limit and max(sizes) > largest_size:
            return f"has no softcap for heads of ({sizes[0]}, {sizes[1]}) on this GPU"

    if spec.windowed and not spec.causal and not row.ahead:
        return "has no window unless the call is causal"
    if request.sinks and row.sinks is None:
        return "has no sinks"
    if request.needs_lse and not row.lse:
        return "returns no log-sum-exp to merge partial results with"

    largest = max(request.head_size, request.value_size)
    if request.deterministic and row.deterministic_to is not None and largest > row.deterministic_to:
        return f"has no deterministic backward for head sizes over {row.deterministic_to}"
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def missing(kernel: Kernel) -> str | None:
    """Return what to install for a kernel; None if its package, or a prebuilt flash-attn, loads."""
    row = SUPPORT[kernel]
    if row.probe is None or available(row.probe):
        return None
    if row.backend != "flash":
        return trouble(row.probe, row.install)

    version = int(kernel[-1])  # "flash2" is flash-attn 2
    prebuilt = flash.prebuilt_trouble(version)
    if prebuilt is None:
        return None
    return f"{trouble(row.probe, row.install)}{prebuilt}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _yes_or_no(flag: bool) -> str:
    return "yes" if flag else "no"


def support_table() -> str:
    """Write ``SUPPORT`` as a Markdown table; the column "here" tells whether a kernel's package loads."""
    head = (
        "backend", "kernel", "device", "dtypes", "head size", "GQA", "window", "softcap", "sinks",
        "deterministic", "context parallel", "here",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for kernel, row in SUPPORT.items():
        cells = (
            row.backend,
            kernel,
            row.device,
            ", ".join(map(_name_of, row.dtypes)),
            row.sizes_text,
            "yes",
            "yes" if row.ahead else "causal",
            _yes_or_no(row.softcap),
            row.sinks or "no",
            row.deterministic,
            _yes_or_no(row.lse),
            _yes_or_no(missing(kernel) is None),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
