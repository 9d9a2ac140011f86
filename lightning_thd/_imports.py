"""Optional packages by name -> the imported module, or an error that says how to install it."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

_BUILD = "pip install --no-build-isolation "  # compiles a package against the installed torch
# Import names -> how to install them, if that is not ``pip install`` with the same name.
_HINTS = {
    "transformers": "pip install 'lightning_thd[hf]'",
    "datasets": "pip install 'lightning_thd[hf]'",
    "pyarrow": "pip install 'lightning_thd[hf]'",
    "accelerate": "pip install 'lightning_thd[accelerate]'",
    "wandb": "pip install 'lightning_thd[wandb]'",
    "jsonargparse": "pip install 'lightning_thd[cli]'",
    "matplotlib": "pip install 'lightning_thd[plots]'",
    "PIL": "pip install pillow",
    "torchao": "pip install 'lightning_thd[fp8]'",
    "flash_attn": f"{_BUILD}flash-attn",
    "flash_attn_interface": "build the hopper folder of the flash-attention repository (flash-attn 3)",
    "transformer_engine": f"{_BUILD}'transformer-engine[pytorch]'",
    "mamba_ssm": f"{_BUILD}mamba-ssm",
    "causal_conv1d": f"{_BUILD}causal-conv1d",
    "fla": "pip install flash-linear-attention",
}


@cache
def available(name: str) -> bool:
    """Return whether the module with this dotted name imports; a build for another ABI counts as absent."""
    return trouble(name) is None


def trouble(name: str, install: str = "") -> str | None:
    """Return why a module does not import here and how to ``install`` it, or None if it imports."""
    top = name.partition(".")[0]
    install = install or _hint(name)
    try:
        if importlib.util.find_spec(top) is None:
            return f"{name} does not import here: {install}"
        importlib.import_module(name)
    except Exception as err:  # a build for another ABI raises exceptions of many classes
        line = f"{err}".partition("\n")[0]  # the rest may be pages of a linker's output
        if isinstance(err, ModuleNotFoundError):  # a submodule or a dependency is missing
            return f"{name} does not import here ({line}): {install}"
        return (
            f"{name} is installed and does not import here ({line}). Was it built for another torch or CUDA? "
            f"Install it again with --force-reinstall --no-deps: {install}"
        )
    return None


def _hint(name: str) -> str:
    """Return how to install the package of a dotted name."""
    top = name.partition(".")[0]
    return _HINTS.get(top, f"pip install {top}")


def installed(name: str) -> bool:
    """Return whether the top-level package ``name`` is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def require(name: str, *, feature: str) -> ModuleType:
    """Import the module that a feature needs; if that fails, raise an error with the install command."""
    try:
        return importlib.import_module(name)
    except Exception as err:  # a build for another ABI raises exceptions of many classes
        raise ModuleNotFoundError(
            f"{feature} needs the package {name!r}, which does not import here ({err}). "
            f"Install it: {_hint(name)}."
        ) from err
