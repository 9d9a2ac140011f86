"""A user's ``training_step`` -> an error naming the line where it does more than compute the model's loss.

Only the last stage of a pipeline has the loss. On the others it is NaN that leads back to their layers: what
depends on its value, or adds to it, would be something else on every rank.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_thd._user_code import described

_LOSSES = ("causal_lm_loss",)


def refuse_decisions_on_loss(module: Any) -> None:
    """Refuse a ``training_step`` whose ``if``, ``while`` or ``assert`` depends on the loss.

    Raises:
        MisconfigurationException: naming the line.
    """
    file, tree = _source(module)
    if tree is None:
        return
    names = _made_of_loss(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert) and names & _names(node.test):
            raise MisconfigurationException(
                f"{described(file, node.test.lineno)} decides by the loss in training_step, and only the "
                "last pipeline stage has its value: other ranks would decide otherwise. Decide in "
                "on_train_batch_end by outputs['loss'], which all ranks have, or set "
                "pipeline_parallel_size=1."
            )


def require_loss_alone(module: Any, loss: Tensor, made: Collection[Any]) -> None:
    """Refuse a loss that depends on weights other than through the model's own loss.

    Args:
        module: the LightningModule.
        loss: what ``training_step`` returned.
        made: nodes of the graph that the model's own loss and balancing loss end in, on this rank.

    Raises:
        MisconfigurationException: naming the weights and the line.
    """
    found = {id(leaf) for leaf in _leaves(loss.grad_fn, {id(node) for node in made})}
    if not found:
        return
    names = [name for name, parameter in module.named_parameters() if id(parameter) in found]
    file, tree = _source(module)
    lines = [described(file, number) for number in _additions(tree)] if tree is not None else []
    where = "; ".join(lines) or "line unknown"
    raise MisconfigurationException(
        f"training_step of {type(module).__name__} returns more than the model's loss: it depends on "
        f"{names[:4] or 'other weights'} in another way too ({where}). Stages of a "
        "pipeline have a part of the weights each, so the sum would be another one on every rank. Return "
        "causal_lm_loss(self.model, batch), perhaps times a number, or set pipeline_parallel_size=1."
    )


def definition(module: Any) -> str:
    """Return the file and line at which ``training_step`` is defined."""
    file, tree = _source(module)
    return described(file, tree.body[0].lineno) if tree is not None else "training_step"


def _leaves(node: Any, stop: Collection[int]) -> Iterator[Tensor]:
    """Yield the weights that a graph reaches without passing through the model's own loss."""
    seen, left = set(stop), [node]
    held = []  # an object for a node lives while somebody holds it, and its id is free after that
    while left:
        node = left.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        held.append(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        left += [following for following, _ in node.next_functions]


def _source(module: Any) -> tuple[str, ast.Module | None]:
    """Parse the source of ``training_step``, with line numbers of its file."""
    try:
        step = inspect.unwrap(type(module).training_step)
        lines, first = inspect.getsourcelines(step)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = inspect.getsourcefile(step) or ""
    except (OSError, TypeError, SyntaxError):
        return "", None
    ast.increment_lineno(tree, first - 1)
    return file, tree


def _made_of_loss(tree: ast.AST) -> set[str]:
    """Return the names of variables that are assigned from the loss, directly or not."""
    found: set[str] = set()
    for _ in range(2):  # a name may be used above the line that makes it, in a loop
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                calls = any(_is_loss(part) for part in ast.walk(node.value))
                if calls or found & _names(node.value):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    found |= {name for target in targets for name in _names(target)}
    return found - {"self"}


def _is_loss(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in _LOSSES


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _additions(tree: ast.AST) -> list[int]:
    """Return the lines that add to a loss or subtract from it."""
    names = _made_of_loss(tree)
    sums = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp | ast.AugAssign)]
    return sorted(
        {
            node.lineno
            for node in sums
            if isinstance(node.op, ast.Add | ast.Sub)
            and (names & _names(node) or any(map(_is_loss, ast.walk(node))))
        }
    )
