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
from lightning_thd._patches import APPLIED, PATCHES

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
def test_what_is_replaced_while_models_are_built_is_in_the_table() -> None:
    for family, model_class in (
        ("llama", "LlamaForCausalLM"),
        ("roberta", "RobertaForSequenceClassification"),
        ("bamba", "BambaForCausalLM"),
        ("gemma3n_text", "Gemma3nForCausalLM"),
        ("deepseek_v32", "DeepseekV32ForCausalLM"),
    ):
        build(family, model_class, "thd")
    known = {path for _, path in APPLIED}
    found = list(replaced())
    assert len(found) > 20
    assert [path for path in found if path not in known] == []


def foreign_assignments(path: Path) -> Iterator[str]:
    """Name the assignments to attributes of imported foreign objects, through one local name at most."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    foreign: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FOREIGN:
            foreign |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            foreign |= {
                (alias.asname or alias.name).partition(".")[0]
                for alias in node.names
                if alias.name.partition(".")[0] in FOREIGN
            }
    for node in nodes:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, ast.Name | ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if first(value) in foreign:
                foreign |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in nodes:
        for target in node.targets if isinstance(node, ast.Assign) else []:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute) and first(one) in foreign:
                    yield ast.unparse(one)
        is_setattr = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr"
        if is_setattr and first(node.args[0]) in foreign:
            yield ast.unparse(node)


def first(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_no_module_assigns_to_what_it_imported_without_a_row() -> None:
    allowed = tuple(row.where for row in PATCHES.values())
    files = {path.relative_to(ROOT): path for path in ROOT.rglob("*.py")}
    found = {f"{name}: {one}" for name, path in files.items() for one in foreign_assignments(path)}
    assert found  # the search finds those that it should
    assert sorted(one for one in found if not one.startswith(allowed)) == []


@pytest.mark.parametrize("row", PATCHES)
def test_rows_name_a_module_that_is_there(row: str) -> None:
    assert (ROOT / PATCHES[row].where).exists()
    assert all(PATCHES[row][:4])
