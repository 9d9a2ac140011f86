"""Messages about FP8 engines that no other test of the room meets."""

from __future__ import annotations

import pytest
import torch

from lightning_thd.precision.checks import check_device
from lightning_thd.precision.recipes import resolve
from tests.precision import standins


def test_an_engine_of_another_maker_and_one_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    standins.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(Exception, match="engine='te' is NVIDIA's. On an AMD GPU .* use engine='torchao'"):
        check_device(resolve("current", "te"), torch.device("cuda", 0))
    monkeypatch.delattr("transformer_engine.common.recipe.NVFP4BlockScaling")
    with pytest.raises(ValueError, match="needs NVFP4BlockScaling, which the installed .* lacks. Upgrade it"):
        resolve("nvfp4", "te")
