"""The fastest precision of a device follows from its tensor cores, not from what it can emulate."""

from __future__ import annotations

import contextlib

import pytest
import torch

from lightning_thd.precision import fastest_precision


@pytest.mark.parametrize(
    ("capability", "native", "wanted"),
    [
        ((9, 0), True, "bf16-mixed"),
        ((7, 5), False, "16-mixed"),
        ((7, 0), False, "16-mixed"),
        ((6, 1), False, "32-true"),
    ],
)
def test_a_gpu(
    capability: tuple[int, int], native: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    assert fastest_precision() == wanted
    assert fastest_precision("cuda:0") == wanted
    assert fastest_precision("cpu") == "32-true"


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fastest_precision() == fastest_precision("cuda") == fastest_precision("mps") == "32-true"


def test_a_name_that_is_no_device() -> None:
    with pytest.raises(ValueError, match="no device"):
        fastest_precision("gpu")
