"""This machine -> its packages, which kernels run here, why others do not, and known-bad versions."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from lightning_thd import __version__
from lightning_thd._imports import available, trouble
from lightning_thd._known_bad import known_problems
from lightning_thd._versions import SUPPORTED, installed_version, is_newer, is_older, releases_of
from lightning_thd.attention.support import SUPPORT, missing
from lightning_thd.cli.arguments import Parser
from lightning_thd.cuda_graph.backend import CudaBackend
from lightning_thd.report.terminal import Table, show_table

_DISTRIBUTIONS = (
    "torch",
    "lightning",
    "torchmetrics",
    "numpy",
    "tensorboard",
    "transformers",
    "accelerate",
    "trl",
    "peft",
    "datasets",
    "pyarrow",
    "ray",
    "triton",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "transformer-engine",
    "mamba-ssm",
    "causal-conv1d",
    "fla-core",
    "flash-linear-attention",
    "tilelang",
    "torchao",
    "fsspec",
    "wandb",
    "jsonargparse",
    "matplotlib",
    "zstandard",
)
_NO_DEVICE = "there is no CUDA device"
# A kind of layer or precision -> its kernels or engine, and the imports they need beside a CUDA device.
_FUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "mamba-2 layers": ("fused by mamba-ssm", ("mamba_ssm", "causal_conv1d")),
    "gated delta layers": ("fused by flash-linear-attention", ("fla", "causal_conv1d")),
    "short convolutions": ("fused by causal-conv1d", ("causal_conv1d",)),
    "fp8 by torchao": ("torchao", ("torchao",)),
    "fp8 by Transformer Engine": ("transformer-engine", ("transformer_engine.pytorch",)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel or engine, its purpose, whether it runs here and, if it does not, why and what to do."""

    serves: str
    name: str
    usable: bool
    why_not: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The findings of ``lightning-thd doctor``; packages with the version None are not installed."""

    machine: dict[str, str]
    packages: dict[str, str | None]
    tested: dict[str, str]  # the releases that the tests ran with, ``5.19 to 5.24``
    untested: list[str]  # what is installed and outside of them
    kernels: list[Kernel]
    problems: list[str]

    def tables(self) -> list[Table]:
        """Build the tables of machine, packages, kernels and known problems."""
        packages = []
        for name, version in self.packages.items():
            tested = f"tested: {self.tested[name]}" if name in self.tested else ""
            packages.append((name, version or "-", tested))

        kernels = []
        for kernel in self.kernels:
            label = f"{kernel.serves}: {kernel.name.removeprefix('fused by ')}"
            kernels.append((label, "yes" if kernel.usable else f"no: {kernel.why_not}"))

        problems = [("PROBLEM", problem) for problem in self.problems]
        problems += [("UNTESTED", release) for release in self.untested]
        if not problems:
            problems = [("No combination that is known to be bad.", "")]

        return [
            Table(columns=("", ""), rows=list(self.machine.items()), text=(0, 1)),
            Table(columns=("", "", ""), rows=packages, text=(0, 1, 2)),
            Table(columns=("", ""), rows=kernels, text=(0, 1)),
            Table(columns=("", ""), rows=problems, text=(0, 1)),
        ]


def diagnose() -> Diagnosis:
    """Collect the versions, kernels and known problems of this machine.

    On a GPU, prebuilt kernels are downloaded if the package ``kernels`` is installed.
    """
    capability = None  # the major number, such as 9 of an H100
    problems = []
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()[0]
        problems = known_problems(capability=capability)  # all are about CUDA

    packages = {name: installed_version(name) for name in _DISTRIBUTIONS}
    why_no_graphs = CudaBackend().unavailable(torch.device("cuda"))

    return Diagnosis(
        machine=_machine(),
        packages=packages,
        tested={name: releases_of(name) for name in packages if name in SUPPORTED},
        untested=_untested({"python": platform.python_version(), **packages}),
        kernels=[
            *_attention(capability),
            *_fused(capability),
            _kernel("CUDA graphs", "torch.cuda.CUDAGraph", why_no_graphs),
        ],
        problems=[f"{each.feature}: {each.problem}; {each.instead}." for each in problems],
    )


def _kernel(serves: str, name: str, why_not: str | None) -> Kernel:
    """Return a kernel, which runs here unless there is a reason why not."""
    return Kernel(serves=serves, name=name, usable=why_not is None, why_not=why_not or "")


def _untested(packages: Mapping[str, str | None]) -> list[str]:
    """Say which packages are older or newer than every release that the tests ran with."""
    lines = []
    for name, (oldest, newest, _) in SUPPORTED.items():
        version = packages.get(name)
        if version is None:
            continue
        if is_newer(version, newest):
            lines.append(
                f"{name} {version} is newer than {newest}, the newest release that the tests ran with."
            )
        if is_older(version, oldest):
            lines.append(f"{name} {version} is too old: install {oldest} or newer.")
    return lines


def _machine() -> dict[str, str]:
    """Return the machine's Python, system, CPU cores and GPUs, by name."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # the cores that this process may use, which macOS does not tell
        cores = len(os.sched_getaffinity(0))
    machine = {
        "lightning_thd": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu cores": str(cores),
        "cuda of torch": str(torch.version.cuda or "none, a CPU build"),
    }

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        machine[f"gpu {index}"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"compute capability {properties.major}.{properties.minor}"
        )
    return machine


def _attention(capability: int | None) -> list[Kernel]:
    """List the attention kernels, each with the reason why it does not run here, if any."""
    kernels = []
    for name, row in SUPPORT.items():
        why_not: str | None
        if capability is not None and row.capability and capability not in row.capability:
            needed = " or ".join(map(str, row.capability))
            why_not = f"needs compute capability {needed}, this GPU has {capability}"
        else:
            why_not = missing(name)
            if not why_not and row.device == "cuda" and capability is None:
                why_not = _NO_DEVICE
        kernels.append(_kernel(f"attention backend={row.backend!r}", name, why_not or None))
    return kernels


def _fused(capability: int | None) -> list[Kernel]:
    """List the fused layers and FP8 engines, each with the reason why it does not run here, if any."""
    kernels = []
    for serves, (name, modules) in _FUSED.items():
        absent = [module for module in modules if not available(module)]
        why_not: str | None = "; ".join(filter(None, map(trouble, absent))) or None
        if why_not is None and capability is None:
            why_not = _NO_DEVICE
        problems = [x for module in modules for x in known_problems(module, capability=capability)]
        if why_not is None and problems:
            why_not = f"{problems[0].problem}; {problems[0].instead}"
        is_nvidia = capability is not None and torch.version.hip is None
        if is_nvidia and "fp8" in serves and torch.cuda.get_device_capability() < (8, 9):
            why_not = "needs compute capability 8.9 or higher"
        kernels.append(_kernel(serves, name, why_not))
    return kernels


def doctor(arguments: Sequence[str]) -> None:
    """Print the diagnosis of this machine."""
    parser = Parser(
        "lightning-thd doctor", description=__doc__, epilog="example: lightning-thd doctor --json"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(list(arguments))
    diagnosis = diagnose()
    if options.json:
        print(json.dumps(asdict(diagnosis), indent=1))
        return
    for i, table in enumerate(diagnosis.tables()):
        if i:
            print()
        show_table(table)
