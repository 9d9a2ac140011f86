"""The layers of a decoder -> those of one rank, and boundaries of the same form in place of others."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd.parallel.pipeline.randomness import draw_from_own_stream, take_number
from lightning_thd.parallel.pipeline.stage import Stage


class StageLayers(nn.ModuleList):
    """The layers of one rank under their names in the whole model, with boundaries in place of others."""

    def __init__(self, layers: nn.ModuleList, stage: Stage) -> None:
        super().__init__()
        self._stage = stage
        # A tuple is not searched for modules: boundaries have no parameters, and no place in checkpoints.
        self._boundaries = tuple(Boundary(layer, i, stage) for i, layer in enumerate(layers))
        for i in stage.layers:
            self.add_module(str(i), layers[i])
            layers[i].register_forward_hook(self._boundaries[i].require_same_form)
            if stage.draws:
                draw_from_own_stream(layers[i], i)
        stage.held = MappingProxyType(self._modules)

    def __len__(self) -> int:
        return len(self._boundaries)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        place = range(len(self))[index]
        found: nn.Module | None = self._modules[str(place)] if self._stage.runs(place) else None
        return self._boundaries[place] if found is None else found


class Boundary(nn.Module):
    """Replaces a layer that another stage holds.

    Args:
        layer: whose plain attributes models ask for (``attention_type``, ``layer_idx``).
        index: its place.
        stage: knows what to send and receive here.
    """

    def __init__(self, layer: nn.Module, index: int, stage: Stage) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, str | int | float | bool) and not name.startswith("_"):
                setattr(self, name, value)
        self._index, self._stage = index, stage
        self._returns = returned_by(layer)
        self._checked = False

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Pass hidden states on, across a stage boundary where one lies here."""
        self._stage.in_layers = True
        if self._stage.draws:
            take_number()
        given = dict(kwargs)
        hidden = args[0] if args else given.pop("hidden_states")
        if not self._checked:
            require_own_inputs(self._index, {**dict(enumerate(args[1:], start=1)), **given})
            self._checked = True
        crossed: Tensor = self._stage.cross(self._index, hidden)
        return crossed if self._returns is None else (crossed, *[None] * (self._returns - 1))

    def require_same_form(self, layer: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Refuse a layer that returns more than hidden states; a forward hook of the layer itself.

        Raises:
            ValueError: naming the layer and what it returns.
        """
        self._stage.in_layers = True
        first, *rest = output if isinstance(output, tuple) else (output,)
        length = len(rest) + 1 if isinstance(output, tuple) else None
        if not isinstance(first, Tensor) or length != self._returns or any(x is not None for x in rest):
            more = ", ".join(type(x).__name__ for x in (first, *rest))
            form = f"{type(output).__name__} of {more}" if isinstance(output, tuple) else more
            raise ValueError(
                f"{type(layer).__name__} returns a {form}; wanted the hidden states alone: what else it "
                "returns would not reach the next pipeline stage. Set pipeline_parallel_size=1."
            )


def returned_by(layer: nn.Module) -> int | None:
    """Read from a layer's source how many values it returns as a tuple; None for one that is no tuple.

    ``return hidden_states, attn_weights`` gives 2. A stage needs it of layers that it never runs.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(layer).forward)))
    except (OSError, TypeError):  # no source
        return None
    found = {
        len(node.value.elts) if isinstance(node.value, ast.Tuple) else None
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Return)
    }
    return found.pop() if len(found) == 1 else None


def require_own_inputs(index: int, inputs: dict[Any, Any]) -> None:
    """Refuse layers that need an input computed from the embedding.

    Ranks without it see NaN, and the rank that has it an input that wants a gradient.
    """
    for name, value in inputs.items():
        for part in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(part, Tensor) or not part.is_floating_point():
                continue
            if part.requires_grad or bool(torch.isnan(part).any()):
                raise ValueError(
                    f"Layer {index} is given {name!r}, which is made of the embedding; only the first "
                    "pipeline stage has that. Set pipeline_parallel_size=1 for this model."
                )
