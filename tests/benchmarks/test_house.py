"""The counts of ``benchmarks/house.py`` find what they say, on a package written for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import house_text as text

MODULE = '''
import inspect
import threading
from typing import TYPE_CHECKING

from torch.utils import _pytree
from lightning_thd.other import _own_helper

if TYPE_CHECKING:
    from torch import _C

KNOWN = {}
SIZES = {"a": 1}
HERE = threading.local()


class THDBatch:
    pass


class Cut(THDBatch):
    pass


def remember(model, name="_modules"):
    """Say _forward_hooks in words."""
    KNOWN[name] = model._compiled_call_impl
    return model.path.endswith("_norm"), SIZES["a"]


def decide(layer, batch):
    if isinstance(batch, Cut):
        return _own_helper(layer)
    return "x" in inspect.getsource(layer)


def operate(torch):
    return torch.ops.aten._unique2
'''


@pytest.fixture
def files(tmp_path: Path) -> list[text.File]:
    folder = tmp_path / "lightning_thd"
    folder.mkdir()
    (folder / "module.py").write_text(MODULE)
    (folder / "other.py").write_text("def _own_helper(batch, shared_prefixes=()):\n    return batch\n")
    return text.read_package(tmp_path)


def test_private_names_of_others_are_told_from_ours(files: list[text.File]) -> None:
    uses, at_import, operators = text.foreign_names(files, {})
    assert {use.name for use in uses} == {"_pytree", "_C", "_modules", "_compiled_call_impl"}
    assert [use.name for use in at_import] == ["_pytree"]
    assert [use.name for use in operators] == ["_unique2"]


def test_the_rows_of_the_table_count_as_private_names(tmp_path: Path) -> None:
    folder = tmp_path / "lightning_thd"
    folder.mkdir()
    (folder / text.TABLE).write_text(
        'BASE = "torch._inductor"\nROWS = {"torch._foreach_norm": 1, f"{BASE}._x": 2}\n'
    )
    (folder / "user.py").write_text('norm = private("torch._foreach_norm")\n')
    uses, at_import, _ = text.foreign_names(text.read_package(tmp_path), {})
    assert [use.name for use in uses] == ["_inductor", "_foreach_norm", "_x"]
    assert at_import == []


def test_what_a_class_inherits_counts_in_its_file(files: list[text.File]) -> None:
    uses, _, _ = text.foreign_names(files, {"module.py": {"_own_helper"}})
    assert "_own_helper" not in {use.name for use in uses}  # it is called by its name, not as an attribute


def test_states_readers_and_questions(files: list[text.File]) -> None:
    assert [state.name for state in text.ambient_states(files)] == ["KNOWN", "HERE"]
    assert [place.name for place in text.readers_of_code(files)] == ["decide (source)"]
    assert [place.name for place in text.questions_of_variants(files)] == ["Cut"]
    assert [place.file for place in text.files_that_know(files, text.is_of_prefixes)] == ["other.py"]
    assert text.files_that_know(files, text.is_of_shards) == []


def test_an_option_and_the_names_of_a_folder_are_no_knowledge_of_a_variant(tmp_path: Path) -> None:
    folder = tmp_path / "lightning_thd"
    (folder / "parallel").mkdir(parents=True)
    (folder / "parallel" / "__init__.py").write_text("from lightning_thd.parallel.shard import shard_batch\n")
    (folder / "parallel" / "tensor.py").write_text("def cut(shard):\n    return shard\n")
    (folder / "user.py").write_text("def collate(share_prefixes=False):\n    return share_prefixes\n")
    (folder / "asks.py").write_text("def run(pack):\n    return pack.shard or pack.prefixes\n")
    files = text.read_package(tmp_path)
    assert [place.file for place in text.files_that_know(files, text.is_of_prefixes)] == ["asks.py"]
    assert [place.file for place in text.files_that_know(files, text.is_of_shards)] == ["asks.py"]
