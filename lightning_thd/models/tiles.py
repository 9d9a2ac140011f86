"""A prepared model -> the same model, whose MLPs and experts run in tiles of tokens.

A gated MLP keeps four values of its intermediate size for each token until its backward pass. In tiles it
keeps only its input, and the backward pass runs the tiles again, one at a time. An MLP works on each token by
itself, so the outputs are those of one call. Legend: T tokens.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_thd._checks import whole_number
from lightning_thd.models.adapted import Adapter, adapt, kind_of
from lightning_thd.models.families.recurrent import MIXERS
from lightning_thd.models.layers import carry_scope
from lightning_thd.models.refusals import is_tower

_TILE: Final = "_thd_mlp_tile"  # the attribute of a model, and of each of its MLPs, that holds the tile
# The classes of transformers whose forward works on each token alone.
_MLP = re.compile(r"(MLP|Mlp|FeedForward|FFN)$")
_EXPERTS = re.compile(r"(Experts|NaiveMoe)$")

_recompute = carry_scope(functools.partial(checkpoint, use_reentrant=False), compilable=True)


def tile_mlps(models: Iterable[nn.Module], mlp_tile: int | None) -> None:
    """Let the MLPs and experts of language models run in tiles of at most ``mlp_tile`` tokens.

    Args:
        models: prepared models of transformers.
        mlp_tile: most tokens of a tile; None keeps what an earlier call has set.

    Raises:
        ValueError: the models already have another tile, have no MLP that can run in tiles, or are cut.
    """
    if mlp_tile is not None:
        whole_number(mlp_tile, "mlp_tile", least=1, advice="Pass the tokens of a tile: 2_048.")

    for model in models:
        if is_tower(model):
            continue
        earlier = model.__dict__.get(_TILE)
        if mlp_tile is not None and earlier not in (None, mlp_tile):
            raise ValueError(
                f"mlp_tile={mlp_tile}, but {type(model).__name__} already runs its MLPs in tiles of "
                f"{earlier} tokens. Pass the same tile, leave it out, or build the model again."
            )
        tile = earlier if mlp_tile is None else mlp_tile
        if tile is not None:
            _tile_model(model, tile)


def tile_of(module: nn.Module | None) -> int | None:
    """Return the tile of the models in a module, or None."""
    modules = () if module is None else module.modules()
    return next((child.__dict__[_TILE] for child in modules if _TILE in child.__dict__), None)


def _tile_model(model: nn.Module, tile: int) -> None:
    """Let the MLPs and experts of one model run in tiles; refuse a model that cannot."""
    towers = [child for child in model.modules() if hasattr(child, "config") and is_tower(child)]
    parts_of_towers = {part for tower in towers for part in tower.modules()}

    blocks: list[tuple[str, nn.Module]] = []
    whole: list[str] = []  # names of experts that run all at once
    for name, child in model.named_modules():
        if child in parts_of_towers:
            continue
        if _works_by_token(child):
            blocks.append((name, child))
        elif _is_stacked(child):
            whole.append(name)

    if whole or not blocks:
        why = "it has no such module"
        if whole:
            why = f"the experts in {whole[0]} take no list of chosen experts"
        raise ValueError(
            f"mlp_tile={tile} runs MLPs and experts that are modules of their own, but "
            f"{type(model).__name__} cannot: {why}. Leave mlp_tile out."
        )

    for name, block in blocks:
        if _TILE not in block.__dict__ and "forward" in vars(block):
            raise ValueError(
                f"mlp_tile={tile}, but the forward of {name} ({type(block).__name__}) was replaced, by "
                "tensor parallelism for example. Call prepare(model, mlp_tile=...) when the model is built."
            )

    for _, block in blocks:
        block.__dict__[_TILE] = tile
        adapt(block, _Tiled)

    model.__dict__[_TILE] = tile


def _works_by_token(module: nn.Module) -> bool:
    """Return whether a module is an MLP, or experts that are told which of them each token has chosen."""
    if kind_of(module, MIXERS):  # RWKV's feed-forward layer reads the token before, too
        return False
    if _MLP.search(type(module).__name__):
        return not any(_EXPERTS.search(type(child).__name__) for child in module.modules())
    arguments = inspect.signature(type(module).forward).parameters
    return _is_stacked(module) and len(arguments) >= 4  # self, hidden, index, weights


def _is_stacked(module: nn.Module) -> bool:
    """Return whether a module holds the weights of all experts of a layer in its own parameters."""
    return bool(_EXPERTS.search(type(module).__name__)) and any(
        parameter is not None and parameter.ndim == 3 for parameter in module._parameters.values()
    )


class _Tiled(Adapter):
    """Runs an MLP on a few tokens at a time, and again in the backward pass."""

    def _thd_run(self: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        tiles = _split(args, kwargs, hidden.shape[:-1], self.__dict__[_TILE])
        run = functools.partial(_run_with, self, dict(self._parameters), forward)
        # Without gradients, nothing is kept that would have to be run again.
        call = functools.partial(_recompute, run) if torch.is_grad_enabled() else run
        outputs = [call(*positional, **named) for positional, named in tiles]
        if not all(isinstance(output, Tensor) for output in outputs):
            raise TypeError(
                f"{type(self).__name__} returned a {type(outputs[0]).__name__}, wanted one tensor with a row "
                "for each token. Build the model without mlp_tile."
            )

        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)


def _run_with(
    module: Any, parameters: dict[str, Any], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a module with the parameters of its first run: tensor parallelism replaces those of experts."""
    present = dict(module._parameters)
    module._parameters.update(parameters)
    try:
        return forward(module, *args, **kwargs)
    finally:
        module._parameters.update(present)


def _split(
    args: tuple[Any, ...], kwargs: dict[str, Any], rows: torch.Size, tile: int
) -> list[tuple[list[Any], dict[str, Any]]]:
    """Cut the arguments of a call that have one row a token, ``[..., T, *]``, into tiles of equal size."""
    count = max(1, -(-rows[-1] // tile))

    def cut(value: Any) -> list[Any]:
        by_token = isinstance(value, Tensor) and value.ndim == len(rows) + 1 and value.shape[:-1] == rows
        if not by_token:
            return [value] * count
        # One backward node for all tiles: slices would each make a gradient of the whole tensor.
        return list(value.split(-(-rows[-1] // count) or 1, dim=-2))

    positional = [cut(value) for value in args]
    named = {name: cut(value) for name, value in kwargs.items()}
    calls = []
    for index in range(count):
        args_of_tile = [pieces[index] for pieces in positional]
        kwargs_of_tile = {name: pieces[index] for name, pieces in named.items()}
        calls.append((args_of_tile, kwargs_of_tile))
    return calls
