"""Everything that replaces a function of torch, Lightning or transformers has a row in one table."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import lightning_thd
from lightning_thd._patches import PATCHES

pytest.importorskip("transformers")

from benchmarks.families import build

ROOT = Path(lightning_thd.__path__[0])
FOREIGN = ("torch", "lightning", "transformers")


def ours(function: Any) -> bool:
    return isinstance(function, FunctionType) and function.__code__.co_filename.startswith(str(ROOT))


def replaced() -> Iterator[str]:
    """Name every function of this package that is in a module or class of another one."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in FOREIGN or module is None:
            continue
        for key, value in list(vars(module).items()):
            # Modules of models import some replaced functions by name; these keep the module they come from.
            if ours(value) and (value.__module__ == name or value.__module__.startswith("lightning_thd")):
                yield f"{name}.{key}"
            if issubclass(type(value), type) and value.__module__ == name:
                yield from (f"{name}.{value.__qualname__}.{k}" for k, v in vars(value).items() if ours(v))


# torch.distributed.reduce_op warns whenever one of its attributes is read.
@pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op`:FutureWarning")
def test_building_models_replaces_nothing_but_the_choice_of_their_attention() -> None:
    for family, model_class in (
        ("llama", "LlamaForCausalLM"),
        ("roberta", "RobertaForSequenceClassification"),
        ("bamba", "BambaForCausalLM"),
        ("gemma3n_text", "Gemma3nForCausalLM"),
        ("deepseek_v32", "DeepseekV32ForCausalLM"),
    ):
        build(family, model_class, "thd")
    door = f"transformers.modeling_utils.{PATCHES['attention chosen'].what}"
    assert [*replaced()] == [door]
    assert [row.where for row in PATCHES.values() if not (ROOT / row.where).exists()] == []


def test_every_object_whose_class_is_replaced_has_a_row() -> None:
    changing = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr == "__class__"
    }
    assert changing == {row.where for row in PATCHES.values() if "__class__" in row.what}
