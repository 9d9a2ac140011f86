"""transformers' convolutions, scans and delta rules -> the same functions, which take states from elsewhere.

Layers look these functions up in their Python module, and find ours there while they run on a pack whose
sequences are not whole on this rank, or share slots. A carrier says where states and earlier slots come from
(see ``stretches``). N slots of this rank, C channels.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightning_thd._imports import available
from lightning_thd.boundaries import Boundaries
from lightning_thd.models.passing.branches import Branches
from lightning_thd.models.passing.scan import OverRanks
from lightning_thd.models.passing.stretches import Carrier, DeltaRule, StateSpace


class _Running(NamedTuple):
    """A layer that runs with our functions."""

    carrier: Carrier
    called: list[str]  # names of the functions that the layer has called


def scan_state_space(
    original: Callable[..., Any],
    carrier: Carrier,
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Any,
) -> Tensor:
    """Scan stretches in place of transformers' ``mamba2_chunk_scan``, with the same arguments."""
    kept = _kernel_options(carrier, options, refused=("z", "initial_states"))
    if dt.dtype in (torch.float16, torch.bfloat16):
        dt = dt.float()

    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    dt = dt.clamp(*dt_limit)

    heads, size = x.shape[-2:]
    recurrence = StateSpace(
        scan=functools.partial(original, **kept),
        decay=decay,
        skip=D,
        chunk_size=chunk_size,
        state_shape=(heads, size, b.shape[-1]),
    )
    return carrier.scan(recurrence, (x[0], dt[0], b[0], c[0]))[None]


def run_delta_rule(
    original: Callable[..., Any],
    carrier: Carrier,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run a delta rule on stretches, in place of transformers' function, with the same arguments."""
    kept = _kernel_options(carrier, options, refused=("initial_state",))
    recurrence = DeltaRule(
        rule=original, options=kept, state_shape=(value.shape[-2], key.shape[-1], value.shape[-1])
    )
    return carrier.scan(recurrence, (query[0], key[0], value[0], g[0], beta[0]))[None], None


def _kernel_options(carrier: Carrier, options: dict[str, Any], *, refused: tuple[str, ...]) -> dict[str, Any]:
    """Return a kernel's options without boundaries and final-state flags; raise for ``refused`` ones."""
    for name in refused:
        if options.get(name) is not None:
            raise ValueError(
                f"A recurrent layer on {carrier.where} passes {name} to its kernel. {carrier.instead}"
            )
    return {name: value for name, value in options.items() if name not in (*_SET_HERE, *refused)}


_SET_HERE: Final = (
    *("seq_idx", "cu_seqlens", "cu_seqlens_cpu", "cu_seq_lens_q"),
    *("return_final_states", "output_final_state"),
)
_CONVOLUTION: Final = "causal_conv1d_fn"
_SCANS: Final[dict[str, Callable[..., Any]]] = {
    "mamba2_chunk_scan": scan_state_space,
    "torch_chunk_gated_delta_rule": run_delta_rule,
    "chunk_kimi_delta_attention": run_delta_rule,
}
_FUSED: Final = "mamba2_split_conv1d_scan_combined"
_KERNELS: Final = (_CONVOLUTION, *_SCANS, _FUSED, "mamba_inner_fn", "mamba_selective_scan")
# Layers -> the scan that carries their state from slot to slot, beside the convolution; None without a scan.
_SSD_SCAN: Final = "mamba2_chunk_scan"
_DELTA_RULE: Final = "torch_chunk_gated_delta_rule"
_CARRIES: Final[dict[str, str | None]] = {
    **dict.fromkeys(("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer"), _SSD_SCAN),
    **dict.fromkeys(("Mamba2Mixer", "NemotronHMamba2Mixer", "Zamba2MambaMixer"), _SSD_SCAN),
    **dict.fromkeys(("OlmoHybridGatedDeltaNet", "Qwen3NextGatedDeltaNet"), _DELTA_RULE),
    **dict.fromkeys(("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), _DELTA_RULE),
    "Qwen4ExpTextGatedDeltaNet": _DELTA_RULE,
    **dict.fromkeys(
        ("BailingHybridDeltaAttention", "KimiLinearDeltaAttention"), "chunk_kimi_delta_attention"
    ),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")),
}


def carried_functions(name: str, layer: type) -> frozenset[str]:
    """Return the functions with which a layer carries its state, or none if it gathers the pack instead."""
    if name not in _CARRIES:
        return frozenset()
    scan = _CARRIES[name]
    wanted = {_CONVOLUTION} if scan is None else {_CONVOLUTION, scan}
    module = sys.modules[layer.__module__]
    if not all(callable(getattr(module, function, None)) for function in wanted):
        return frozenset()
    return frozenset(wanted)


def carrier_of(boundaries: Boundaries, layer: Any) -> Carrier | None:
    """Return what carries the state of a layer between stretches; None if nothing does on this pack.

    As in attention, the layer's kernel call says whether keys are on other ranks or in slots of others.
    """
    if not layer._thd_carried:
        return None
    call = boundaries.call(layer)
    if call.exchange is not None:
        return OverRanks(call.exchange) if call.exchange.carries else None
    return None if call.keys is None else Branches(boundaries)


def run_carried(
    layer: Any,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    carrier: Carrier,
) -> Any:
    """Call a layer's forward and carry its states between stretches; on a shard, a collective.

    The layer looks its convolution and its scan up in its Python module. While it runs, it finds ours there.
    """
    module: Any = sys.modules[layer._thd_original.__module__]
    running = _Running(carrier, [])
    with _replaced(module, functools.partial(_carrying, running)):
        out = function(*args, **kwargs)

    called = sorted(running.called)
    wanted = sorted(layer._thd_carried)
    if called != wanted:
        raise RuntimeError(
            f"A recurrent layer on {carrier.where} called {called}, but {wanted} carry its "
            f"state. Another kernel replaces them (use_kernels=True?). {carrier.instead}"
        )

    return out


def functions_in_torch(layer: type, tokens: Tensor) -> AbstractContextManager[None]:
    """Run a layer on the host with transformers' own functions, in place of kernels that are installed.

    An installed kernel replaces them on every device, and refuses tensors of a CPU.
    """
    if tokens.device.type not in ("cpu", "meta") or not _kernels_are_installed():
        return nullcontext()
    return _replaced(sys.modules[layer.__module__], _in_torch)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _kernels_are_installed() -> bool:
    return any(map(available, _PACKAGES))


# Layers of several threads would find each other's functions: backward recomputes in its own threads.
_REPLACING: Final = threading.RLock()
# The packages with kernels of these functions.
_PACKAGES: Final = ("causal_conv1d", "mamba_ssm", "fla")


@contextmanager
def _replaced(module: Any, make: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Generator[None]:
    """Put other functions into a modeling file of transformers, for as long as one layer runs."""
    with _REPLACING:
        originals = {
            name: getattr(module, name) for name in _KERNELS if callable(getattr(module, name, None))
        }
        for name, original in originals.items():
            setattr(module, name, make(name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(module, name, original)


def _in_torch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs an installed kernel only on tensors that are not on the host."""
    in_torch = inspect.unwrap(original)

    def run(*args: Any, **kwargs: Any) -> Any:
        # A call that has boundaries may name all its arguments.
        if kwargs.get("seq_idx") is not None or kwargs.get("cu_seqlens") is not None:
            return original(*args, **kwargs)
        function = in_torch if args[0].device.type in ("cpu", "meta") else original
        return function(*args, **kwargs)

    return run


def _carrying(running: _Running, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' function that takes states and earlier slots from a carrier."""
    run = _in_torch(name, original)

    def on_stretches(*args: Any, **kwargs: Any) -> Any:
        if name == _FUSED:  # None means that the kernel, which fuses convolution and scan, is unavailable
            return None
        running.called.append(name)
        function: Callable[..., Any] = _SCANS.get(name, convolve)
        return function(run, running.carrier, *args, **kwargs)

    return on_stretches


# ---- Convolutions


def convolve(
    original: Callable[..., Tensor],
    carrier: Carrier,
    x_1CN: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """Run a causal convolution, weight ``[C, W]``, over stretches ``[1, C, N]``; on a shard, a collective."""
    kept = _kernel_options(carrier, options, refused=("initial_states", "final_states_out"))
    rows, reach = carrier.near(x_1CN[0].transpose(0, 1), weight.shape[-1] - 1)
    read = torch.cat([rows.index_select(0, reach.rows), rows.new_zeros(1, rows.shape[1])])

    outputs = []
    for source in reach.sources:
        grid = read.index_select(0, source.flatten()).unflatten(0, source.shape)  # type: ignore[no-untyped-call]
        out = original(grid.transpose(1, 2).contiguous(), weight, bias, activation=activation, **kept)
        outputs.append(out.transpose(1, 2).flatten(0, 1))

    out_NC: Tensor = torch.cat(outputs).index_select(0, reach.own)
    return out_NC.transpose(0, 1)[None]
