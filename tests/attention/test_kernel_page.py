"""The table of ``docs/guides/install.md`` that says which kernel runs equals what ``choose`` chooses.

Every combination of the features below is in exactly one row. SECURITY.md
names the kernels that are downloaded.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_thd.attention import support
from lightning_thd.attention.kernels.flash import PREBUILT
from lightning_thd.attention.spec import make_spec
from lightning_thd.attention.support import Kernel, Request, choose
from tests.attention import standins

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "install.md"
HEAD = "| GPU (compute capability) | call |"
# A column of the table -> the doubles to install.
COLUMNS = {
    "torch only": (),
    "flash-attn 2": ("flash2",),
    "flash-attn 3": ("flash3",),
    "flash-attn 4": ("flash4",),
    "`kernels`": None,
}
NAMES: dict[str, tuple[Kernel, ...]] = {
    "flash-attn 3": ("flash3",),
    "4": ("flash4",),
    "torch": ("torch",),
    "flash-attn 2": ("flash2",),
}
SIZES = ((64, 64), (80, 80), (128, 128), (192, 128), (192, 192), (256, 256), (320, 320))
WINDOWS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 100},
    {"causal": False},
    {"causal": False, "window": (3, 2)},
)


@cache
def table() -> dict[tuple[int, str], dict[str, str]]:
    """Read the page's rows: compute capability and call -> column -> kernel."""
    lines = PAGE.read_text().partition(HEAD)[2].splitlines()
    columns = _cells(HEAD + lines[0])[2:]
    assert columns == list(COLUMNS)
    rows: dict[tuple[int, str], dict[str, str]] = {}
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        device, call, *kernels = _cells(line)
        numbers = re.search(r"\((\d+)(?:(, | to )(\d+))?\)$", device)
        assert numbers, device
        first, between, last = int(numbers[1]), numbers[2], int(numbers[3] or numbers[1])
        capabilities = range(first, last + 1) if between == " to " else {first, last}
        for capability in capabilities:
            assert (capability, call) not in rows
            rows[capability, call] = dict(zip(columns, kernels, strict=True))
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


@cache
def requests() -> list[Request]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    features = product(range(5, 13), dtypes, SIZES, WINDOWS, (None, 30.0), (False, True), (False, True))
    return [
        Request(
            device="cuda",
            dtype=dtype,
            head_size=sizes[0],
            value_size=sizes[1],
            spec=make_spec(sizes[0], softcap=softcap, **window),
            sinks=sinks,
            needs_lse=sinks,
            deterministic=deterministic,
            capability=capability,
        )
        for capability, dtype, sizes, window, softcap, sinks, deterministic in features
    ]


def call_of(request: Request) -> str:
    """Return the call under which a reader of the page looks up a request."""
    capability = request.capability or 0
    half = request.dtype in (torch.float16, torch.bfloat16)
    largest = max(request.head_size, request.value_size)
    softcap = bool(request.spec.softcap)

    if capability >= 8 and half and largest <= 256:
        call = "usual"
        if capability == 9 and request.deterministic and largest > 192:
            call = "deterministic, heads over 192"
        if capability in (10, 11) and softcap and request.value_size > 128:
            call = "values over 128"
        return call + ", with softcap" * softcap

    both_sides = request.spec.windowed and not request.spec.causal
    too_old = request.dtype == torch.bfloat16 and capability < 8
    if request.dtype == torch.float64 or too_old or softcap or both_sides:
        others = [call for _, call in table() if call.startswith("other calls")]
        return others[0]
    return "fp32, larger heads, fp16 before Ampere"


def install(patch: pytest.MonkeyPatch, column: str) -> None:
    doubles = COLUMNS[column]
    if doubles is None:
        standins.install_prebuilt(patch)
    else:
        standins.install(patch, *doubles)


@pytest.mark.parametrize("column", COLUMNS)
def test_every_call_takes_the_kernel_of_its_row(on_cuda: pytest.MonkeyPatch, column: str) -> None:
    install(on_cuda, column)
    on_cuda.setattr(support.trial, "trouble", lambda *_: None)
    rows = table()
    met = set()
    for request in requests():
        row = (request.capability or 0, call_of(request))
        assert choose("auto", request) == rows[row][column], (column, request)
        met.add(row)
    assert met == set(rows), "rows of the page that no call of this test belongs to"


@pytest.mark.filterwarnings("ignore:Attention does not run on flash-attn")
@pytest.mark.parametrize(
    ("column", "instead"),
    [("flash-attn 3", "torch only"), ("flash-attn 4", "torch only"), ("`kernels`", "flash-attn 2")],
)
def test_a_kernel_that_fails_its_trial_leaves_the_call_to_the_next(
    on_cuda: pytest.MonkeyPatch, column: str, instead: str
) -> None:
    install(on_cuda, column)
    on_cuda.setattr(support.trial, "trouble", lambda *_: "it failed: stand-in")
    rows = table()
    for request in requests():
        row = rows[request.capability or 0, call_of(request)]
        assert choose("auto", request) == row[instead], (column, request)


def test_the_first_of_several_packages_is_the_one_that_the_page_says(on_cuda: pytest.MonkeyPatch) -> None:
    standins.install(on_cuda, "flash2", "flash3", "flash4", "te")
    on_cuda.setattr(support.trial, "trouble", lambda *_: None)
    sentence = re.search(
        r"Of several packages in one environment, (.*?) comes first, then (.*)\.", PAGE.read_text()
    )
    assert sentence
    said = [sentence[1], *re.split(r", | and ", sentence[2])]
    order = [kernel for name in said for kernel in NAMES[name]]
    assert sorted(order) == ["flash2", "flash3", "flash4", "torch"]
    order += ["efficient", "portable"]

    rows = table()
    for request in requests():
        row = rows[request.capability or 0, call_of(request)]
        assert choose("auto", request) == min(set(row.values()), key=order.index), request


def test_transformer_engine_is_never_chosen(on_cuda: pytest.MonkeyPatch) -> None:
    standins.install(on_cuda, "te")
    rows = table()
    for request in requests():
        row = rows[request.capability or 0, call_of(request)]
        assert choose("auto", request) == row["torch only"], request


@pytest.mark.parametrize(("device", "kernel"), [("cpu", "cpu"), ("mps", "portable"), ("xpu", "portable")])
def test_devices_without_cuda_have_one_kernel(device: str, kernel: str) -> None:
    sentences = PAGE.read_text()
    assert "A CPU takes `cpu` for every call. Other devices (MPS, XPU, HPU) take `portable`." in sentences
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    for dtype, sizes, softcap in product(dtypes, SIZES, (None, 30.0)):
        spec = make_spec(sizes[0], softcap=softcap)
        request = Request(
            device=device, dtype=dtype, head_size=sizes[0], value_size=sizes[1], spec=spec, sinks=True
        )
        assert choose("auto", request) == kernel


def test_the_security_page_names_what_is_downloaded() -> None:
    page = (PAGE.parents[2] / "SECURITY.md").read_text()
    assert len(PREBUILT) == 2
    for version, (repository, revision) in PREBUILT.items():
        assert f"| flash-attn {version}, version {revision} of `{repository}` |" in page
