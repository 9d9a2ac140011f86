"""Nests of tuples, lists and dicts, against torch's own functions."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from lightning_thd._trees import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_paths,
    tree_unflatten,
)

Point = namedtuple("Point", "x y")
NESTS: dict[str, Any] = {
    "a leaf": 3,
    "nothing": None,
    "empty": ((), [], {}),
    "tuples and lists": (1, [2, (3, None)], "text"),
    "dicts": {"b": {"c": 1}, "a": [2, {"d": 3.0}]},
    "a named tuple": Point(1, Point(2, [3])),
    "an ordered dict": OrderedDict(z=1, a=(2, 3)),
}


@pytest.mark.parametrize("name", NESTS)
def test_nests_are_taken_apart_and_put_together_as_torch_does(name: str) -> None:
    nest = NESTS[name]
    leaves, structure = tree_flatten(nest)
    assert leaves == tree_leaves(nest) == _pytree.tree_leaves(nest)
    assert tree_unflatten(leaves, structure) == nest
    assert tree_map(repr, nest) == _pytree.tree_map(repr, nest)
    paths = [(_pytree.keystr(path), leaf) for path, leaf in _pytree.tree_flatten_with_path(nest)[0]]
    if "named" not in name:  # torch names fields
        assert list(tree_paths(nest)) == paths


def test_only_leaves_of_a_class_are_changed() -> None:
    assert tree_map_only(int, lambda x: -x, (1, ["text", {"x": 2}])) == (-1, ["text", {"x": -2}])


def test_an_output_of_transformers_keeps_its_class_and_attributes() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.CausalLMOutput(loss=torch.ones(()), logits=torch.zeros(2))
    doubled = tree_map(lambda x: x + 1, output)
    assert type(doubled) is outputs.CausalLMOutput
    assert float(doubled.loss) == 2
    assert doubled.logits.tolist() == [1, 1]
    assert output.logits.tolist() == [0, 0]
    leaves, structure = tree_flatten(output)
    again = tree_unflatten(leaves, structure)
    assert again.logits is output.logits
