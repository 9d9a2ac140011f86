"""Sources of GPU packages -> ``signatures.json``: the parameters that strict doubles here have to have.

``python -m tests.signatures FOLDER`` reads unpacked sources, without importing them, and writes the file anew
with the date: FOLDER holds ``flash_attn-2.8.3`` and its like, as ``SOURCES`` names them. Most of these
packages install only beside a GPU; what they take is in their text.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("signatures.json")
FLASH2, FLASH4, ENGINE = "flash_attn-2.8.3", "flash_attn_4-4.0.0b36", "transformer_engine-2.20.2"
DPA = "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py"
SSM, CONV, FLA = "mamba_ssm-2.3.2.post1", "causal_conv1d-1.7.0", "fla_core-0.6.0"
# name here -> folder of a version, file, function
SOURCES: dict[str, tuple[str, str, str]] = {
    "flash2_forward": (FLASH2, "flash_attn/flash_attn_interface.py", "_flash_attn_varlen_forward"),
    "flash2_backward": (FLASH2, "flash_attn/flash_attn_interface.py", "_flash_attn_varlen_backward"),
    "flash3_tag_forward": (FLASH2, "hopper/flash_attn_interface.py", "_flash_attn_forward"),
    "flash3_tag_backward": (FLASH2, "hopper/flash_attn_interface.py", "_flash_attn_backward"),
    "flash4_forward": (FLASH4, "flash_attn/cute/interface.py", "_flash_attn_fwd"),
    "flash4_backward": (FLASH4, "flash_attn/cute/interface.py", "_flash_attn_bwd"),
    "te_init": (ENGINE, DPA, "DotProductAttention.__init__"),
    "te_forward": (ENGINE, DPA, "DotProductAttention.forward"),
    "mamba_chunk_scan_combined": (
        SSM,
        "mamba_ssm/ops/triton/ssd_combined.py",
        "mamba_chunk_scan_combined",
    ),
    "mamba_split_conv1d_scan_combined": (
        SSM,
        "mamba_ssm/ops/triton/ssd_combined.py",
        "mamba_split_conv1d_scan_combined",
    ),
    "causal_conv1d_fn": (CONV, "causal_conv1d/causal_conv1d_interface.py", "causal_conv1d_fn"),
    "chunk_gated_delta_rule": (FLA, "fla/ops/gated_delta_rule/chunk.py", "chunk_gated_delta_rule"),
    "fla_causal_conv1d": (FLA, "fla/modules/causal_conv1d/ops.py", "causal_conv1d"),
}
Parameters = list[list[Any]]  # name, whether it has a default


def parameters_in(source: str, name: str) -> Parameters:
    """List the parameters of a function, ``Class.method`` too, from its text; ``self`` is left out."""
    body: list[ast.stmt] = ast.parse(source).body
    *classes, function = name.split(".")
    for owner in classes:
        body = next(x for x in body if isinstance(x, ast.ClassDef) and x.name == owner).body
    found = next(x for x in body if isinstance(x, ast.FunctionDef) and x.name == function)
    plain = [*found.args.posonlyargs, *found.args.args]
    without = len(plain) - len(found.args.defaults)
    listed: Parameters = [[x.arg, i >= without] for i, x in enumerate(plain)]
    only = zip(found.args.kwonlyargs, found.args.kw_defaults, strict=True)
    listed += [[x.arg, default is not None] for x, default in only]
    if found.args.kwarg is not None:
        listed.append([f"**{found.args.kwarg.arg}", True])
    return [x for x in listed if x[0] != "self"]


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """List the parameters of a double in the same form."""
    found = inspect.signature(function).parameters.values()
    return [[p.name, p.default is not inspect.Parameter.empty] for p in found if p.name != "self"]


def recorded(name: str) -> Parameters:
    """Give what the file says about a function."""
    functions: dict[str, dict[str, Any]] = json.loads(FILE.read_text())["functions"]
    listed: Parameters = functions[name]["parameters"]
    return listed


def main(argv: list[str] | None = None) -> None:
    """Write the file; names of sources that the folder lacks are kept as they were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(argv).folder
    old = json.loads(FILE.read_text())["functions"] if FILE.exists() else {}
    functions: dict[str, Any] = {}
    for name, (version, path, function) in SOURCES.items():
        file = folder / version / path
        if not file.exists():
            functions[name] = old[name]
            continue
        functions[name] = {
            "version": version,
            "function": f"{path}:{function}",
            "read": datetime.now(UTC).date().isoformat(),
            "parameters": parameters_in(file.read_text(), function),
        }
    FILE.write_text(json.dumps({"functions": functions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
