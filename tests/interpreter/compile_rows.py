"""Compile the kernels of the losses for sm_90 without a GPU, and print what ptxas says of each, as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from lightning_thd.loss.kernels import rows

_TYPES = {
    "z": "*fp32", "out": "*bf16", "bias": "*bf16", "targets": "*i64", "weights": "*fp32", "losses": "*fp32",
    "stats": "*fp32", "factors": "*fp32", "stride": "i32", "out_stride": "i32", "columns": "i32",
    "start": "i32", "rows": "i32", "ignore": "i32", "smoothing": "fp32", "z_loss": "fp32", "scale": "fp32",
    "cap": "fp32", "heat": "fp32", "u": "*fp32", "taught_bias": "*bf16", "sums": "*fp32", "beta": "fp32",
    "log_student": "fp32", "log_teacher": "fp32", "taught_scale": "fp32", "taught_cap": "fp32",
}  # fmt: skip
# What torch's allocator and ``RowBuffer`` align to 16 bytes or numbers; so Triton specialises its kernels.
_ALIGNED = (
    "z",
    "u",
    "out",
    "bias",
    "taught_bias",
    "sums",
    "targets",
    "weights",
    "losses",
    "stats",
    "factors",
    "stride",
    "out_stride",
)
_BIASES = {"bias": "BIAS", "taught_bias": "TAUGHT_BIAS"}


def kernel_report(
    kernel: Any, columns: int, rows_at_once: int = 1, **constants: bool | int
) -> dict[str, int]:
    """Compile a kernel, and return registers, bytes of spills and the widths of loads and stores."""
    block, warps = rows.shape_of(columns, rows_at_once)
    every: dict[str, Any] = {"CAP": False, "BIAS": False, "TOTAL": False, "ENTROPY": False, "SLOPE": False}
    every |= {"TAUGHT_CAP": False, "TAUGHT_BIAS": False, **constants, "BLOCK": block}
    every |= {name: None for name, flag in _BIASES.items() if not every[flag]}
    names = kernel.arg_names
    fixed = {name: every[name] for name in names if name in every}
    signature = {name: "constexpr" if name in fixed else _TYPES[name] for name in names}
    aligned = [name for name in _ALIGNED if name in names and name not in fixed]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
    ptx = compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr

    return {
        "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", said)),
        "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill", said)),
        "threads": 32 * warps,
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4", ptx)),
        "wide_stores": len(re.findall(r"st\.global\S*\.v4", ptx)),
    }


def main() -> None:
    reports: dict[str, dict[str, int]] = {}
    for columns in (1000, 151_936):
        for cap in (False, True):
            title = f"{columns}{', softcap' if cap else ''}"
            reports[f"loss, {title}"] = kernel_report(rows._nll, columns, CAP=cap)
            reports[f"loss with penalties and bias, {title}"] = kernel_report(
                rows._nll, columns, CAP=cap, BIAS=True, TOTAL=True
            )
            reports[f"statistics, {title}"] = kernel_report(
                rows._statistics, columns, CAP=cap, ENTROPY=True, TOTAL=True
            )
            reports[f"gradient, {title}"] = kernel_report(rows._gradient, columns, CAP=cap, SLOPE=True)
            for kind, number in rows.KINDS.items():
                options: dict[str, Any] = {"rows_at_once": 2, "KIND": number, "CAP": cap, "TAUGHT_CAP": cap}
                if kind != "kl":
                    reports[f"divergence {kind}, {title}"] = kernel_report(
                        rows._divergence_terms, columns, **options
                    )
                reports[f"gradient of {kind}, {title}"] = kernel_report(
                    rows._divergence_gradient, columns, **options
                )

    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main()
