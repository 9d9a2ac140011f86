"""Optional packages by name -> the imported module, or an error that says how to install it."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

# package to import -> (what to install, what the user can do without it)
_HINTS: dict[str, tuple[str, str]] = {
    "transformers": (
        "pip install 'lightning_thd[hf]'",
        "Models that call varlen_attention need nothing more.",
    ),
    "datasets": (
        "pip install 'lightning_thd[hf]'",
        "A list, a JSONL file or a folder of text needs nothing more.",
    ),
    "pyarrow": ("pip install 'lightning_thd[hf]'", "JSONL and text files need nothing more."),
    "accelerate": ("pip install 'lightning_thd[accelerate]'", "Lightning needs nothing more."),
    "wandb": ("pip install 'lightning_thd[wandb]'", "TensorBoard and CSV need nothing more."),
    "jsonargparse": ("pip install 'lightning_thd[cli]'", "From Python nothing more is needed."),
    "matplotlib": ("pip install 'lightning_thd[plots]'", "The table needs nothing more."),
    "flash_attn": (
        "pip install --no-build-isolation flash-attn",
        "backend='cpu' and 'torch' need nothing more.",
    ),
    "flash_attn_interface": (
        "build the hopper folder of the flash-attention repository (flash-attn 3)",
        "backend='cpu' and 'torch' need nothing more.",
    ),
    "transformer_engine": (
        "pip install --no-build-isolation 'transformer-engine[pytorch]'",
        "backend='cpu' and 'torch' need nothing more, and engine='torchao' runs FP8 without it.",
    ),
    "mamba_ssm": (
        "pip install --no-build-isolation mamba-ssm",
        "The layer runs sequence by sequence without it.",
    ),
    "causal_conv1d": (
        "pip install --no-build-isolation causal-conv1d",
        "The layer runs sequence by sequence without it.",
    ),
    "torchao": ("pip install 'lightning_thd[fp8]'", "bf16 needs nothing more."),
    "fla": ("pip install flash-linear-attention", "The layer runs sequence by sequence without it."),
}


@cache
def available(name: str) -> bool:
    """Return whether a module of a dotted name imports; a build for another ABI counts as absent."""
    return trouble(name) is None


def trouble(name: str, install: str = "") -> str | None:
    """Return why a module does not import here and how to ``install`` it, or None if it imports."""
    top = name.partition(".")[0]
    install = install or _hint(name)[0]
    try:
        if importlib.util.find_spec(top) is None:
            return f"{name} does not import here: {install}"
        importlib.import_module(name)
    except Exception as err:  # a build for another ABI raises many kinds
        line = f"{err}".partition("\n")[0]
        return (
            f"{name} is installed and does not import here ({line}). Was it built for another torch or CUDA? "
            f"Install it again with --force-reinstall --no-deps: {install}"
        )
    return None


def _hint(name: str) -> tuple[str, str]:
    top = name.partition(".")[0]
    return _HINTS.get(top, (f"pip install {top}", ""))


def installed(name: str) -> bool:
    """Return whether the top-level package ``name`` is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def require(name: str, *, feature: str) -> ModuleType:
    """Import a module, or raise ModuleNotFoundError with the command that installs what a feature needs."""
    try:
        return importlib.import_module(name)
    except Exception as err:  # a build for another ABI raises many kinds
        install, otherwise = _hint(name)
        raise ModuleNotFoundError(
            f"{feature} needs the package {name!r}, which does not import here ({err}). "
            f"Install it: {install}. {otherwise}".rstrip()
        ) from err
