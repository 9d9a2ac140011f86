"""A module -> the same module with compiled layers, while its step is captured.

A captured step has fixed shapes, so its layers compile statically; only the number of offsets is dynamic, and
all buckets of as many slots share one compiled graph. When the capture ends, the layers are as they were:
replays run the compiled kernels without Python, and a batch that fits no bucket runs eagerly. So no step
checks guards.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd._find import is_compiled_in_place, is_compiled_wrapper
from lightning_thd._private import private
from lightning_thd.cuda_graph.backend import Backend, CudaBackend
from lightning_thd.cuda_graph.errors import CaptureError
from lightning_thd.models.families.recurrent import has_mixers
from lightning_thd.parallel.fsdp import layers_of

_OLDEST = (7, 0)  # the compute capability that torch's compiler needs for triton's kernels
_MOST_GRAPHS = 64  # kinds of layers times numbers of slots in a process; torch's default is 8
_COMPILED_HERE = "_thd_compiles"  # marks the compiled forward of a layer
_WITHOUT = "Leave compile_layers out to replay uncompiled layers."


def cannot_compile(module: nn.Module, backend: Backend) -> str | None:
    """Return why the layers of a module cannot be compiled inside graphs, and what to do, or None."""
    if getattr(backend, "compiled", None) is None:
        return (
            f"compile_layers=True needs a backend with a method compiled(function), and {backend.name!r} has "
            f"none. {_WITHOUT}"
        )

    missing = _missing(backend)
    if missing is not None:
        return f"compile_layers=True needs {missing}. {_WITHOUT}"
    if not layers_of(module):
        return (
            f"compile_layers=True found no layers in {type(module).__name__}: it looks for the classes in "
            "_no_split_modules and for elements of ModuleLists. Compile its parts yourself, "
            "part.compile(dynamic=False), or leave compile_layers out."
        )

    if has_mixers(module):
        return (
            f"compile_layers=True: {type(module).__name__} has layers that carry a state or a convolution, "
            f"which torch's compiler cannot trace in one graph. {_WITHOUT}"
        )
    return None


def _missing(backend: Backend) -> str | None:
    """Return what the compiler needs and this machine lacks, as part of a sentence, or None."""
    compiler = private("torch._dynamo")
    if not compiler.is_dynamo_supported():
        release = ".".join(map(str, sys.version_info[:2]))
        return f"torch.compile, which torch {torch.__version__} does not support on Python {release}"

    needs_triton = isinstance(backend, CudaBackend) and backend.compiler == "inductor"
    if not needs_triton or not torch.cuda.is_available():
        return None
    if importlib.util.find_spec("triton") is None:
        return "triton, which torch's wheels for CUDA on Linux bring: pip install triton"
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST:
        return f"a GPU of compute capability 7.0 or more, and this one has {capability[0]}.{capability[1]}"
    return None


def is_compiled(module: nn.Module) -> bool:
    """Return whether a part of a module is compiled, by ``Module.compile``, ``torch.compile`` or here."""
    if "torch._dynamo" not in sys.modules:
        return False  # nothing was compiled in this process
    return any(
        is_compiled_wrapper(child)
        or is_compiled_in_place(child)
        or hasattr(vars(child).get("forward"), _COMPILED_HERE)
        for child in module.modules()
    )


@contextlib.contextmanager
def compiled_layers(module: nn.Module, backend: Backend) -> Iterator[None]:
    """Compile the layers of a module inside this context, except layers that the user has compiled.

    Each layer's forward is compiled, so that its hooks run outside of compiled code.
    """
    reason = cannot_compile(module, backend)
    if reason is not None:
        raise CaptureError(reason)

    compiled: Callable[..., Callable[..., Any]] = getattr(backend, "compiled")  # noqa: B009  # see cannot_compile
    layers: list[Any] = [layer for layer in layers_of(module) if not is_compiled_in_place(layer)]
    old_forwards = [vars(layer).get("forward") for layer in layers]  # mostly None: that of the class
    for layer in layers:
        layer.forward = compiled(layer.forward)
        setattr(layer.forward, _COMPILED_HERE, True)

    # DDP's part of the compiler cuts graphs at its buckets of gradients, which no capture has. And classes of
    # layers share a function of transformers, by which the compiler counts.
    limits = private("torch._dynamo").config.patch(optimize_ddp=False, recompile_limit=_MOST_GRAPHS)
    # A step whose FLOPs are counted runs compiled code uncompiled, and a graph would keep it so.
    compiles: Any = torch.compiler.set_stance("default")
    with compiles, limits:
        try:
            yield
        except Exception as error:
            if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch")):
                raise CaptureError(_of_compiler(error)) from error
            raise
        finally:
            for layer, forward in zip(layers, old_forwards, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward


def _of_compiler(error: Exception) -> str:
    """Return the message for an error of torch's compiler."""
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"torch's compiler cannot compile the layers ({type(error).__name__}: {first_line}). {_WITHOUT}"


def with_dynamic_length(offsets: Tensor) -> None:
    """Let compiled layers take offsets of any number of sequences."""
    private("torch._dynamo").maybe_mark_dynamic(offsets, 0)


def uncompiled(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled parts of a module run uncompiled, so that modes see operators."""
    if not is_compiled(module):
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager
