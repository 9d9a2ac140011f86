"""Messages about FP8 engines that no other test of the room meets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.plugins.precision import Precision

from lightning_thd.precision.recipes import check_device, resolve
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


@pytest.mark.parametrize(
    ("written", "wanted"), [("lm_head", ("lm_head",)), (["lm_head", "*gate"], ("lm_head", "*gate"))]
)
def test_a_command_line_constructs_the_plugin(written: Any, wanted: tuple[str, ...]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Precision, "plugin")
    settings = {"recipe": "tensorwise", "engine": "torchao", "emulate": True, "keep": written}
    settings["weights_dtype"] = "torch.float32"
    given = {"class_path": "lightning_thd.precision.FP8Precision", "init_args": settings}
    instantiate = getattr(parser, "instantiate", parser.instantiate_classes)
    plugin = instantiate(parser.parse_object({"plugin": given})).plugin
    assert plugin.keep == wanted
    assert plugin.weights_dtype is torch.float32
