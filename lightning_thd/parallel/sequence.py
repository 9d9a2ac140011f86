"""A tensor-parallel model -> the same model, whose ranks each hold a part of the slots between blocks.

Norms, residuals and dropout then work on T / tp slots, which saves memory. Every attention or feed-forward
block of a layer gathers its input, and keeps only this rank's slots of its output.
Legend: T slots of the pack, or of its context-parallel shard; tp tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd._find import has_parameters
from lightning_thd.parallel.exchange import gather_same, keep_own
from lightning_thd.parallel.fsdp import layers_of, towers_of
from lightning_thd.parallel.pipeline.stage import PassThrough, stage_of
from lightning_thd.parallel.tensor import sum_own_gradients


def apply_sequence_parallel(model: Any, group: dist.ProcessGroup) -> None:
    """Change a model in place: between its blocks, each tensor-parallel rank holds a part of the slots."""
    if towers_of(model):
        raise ValueError(
            f"sequence_parallel=True, but {type(model).__name__} inserts the outputs of its tower among the "
            "embeddings of the whole pack. Set sequence_parallel=False."
        )
    layers = layers_of(model)
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    base = _holder(model, layers)
    around = base.children() if base is not None else ()
    norms = [child for child in around if _is_norm(child) or isinstance(child, PassThrough)]
    if not layers or embedding is None or len(norms) != 1:
        raise ValueError(
            f"sequence_parallel=True wants layers, an embedding and one last norm; {type(model).__name__} "
            f"has {len(layers)} layers, {len(norms)} norms beside them, {'an' if embedding else 'no'} "
            "embedding. Set sequence_parallel=False."
        )
    for module in _embeddings(base, [embedding, norms[0], *layers]):
        _keep_output(module, group)
    for layer in layers:
        if own := [name for name, _ in layer.named_parameters(recurse=False)]:
            raise ValueError(
                f"sequence_parallel=True supports norms and blocks, but {type(layer).__name__} holds {own} "
                "itself. Set sequence_parallel=False."
            )
        children = (list(x) if isinstance(x, nn.ModuleList) else [x] for x in layer.children())
        for child in chain.from_iterable(children):
            if _is_norm(child):
                sum_own_gradients(child, group)
            else:
                _gather_and_keep(child, group)
    stage = stage_of(model)
    if isinstance(norms[0], PassThrough):  # a pipeline stage without the last norm
        _gather_output(norms[0], group, lambda: False)
        return
    sum_own_gradients(norms[0], group)
    _gather_output(norms[0], group, lambda: stage is None or stage.holds_head)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and all(p.ndim == 1 for p in module.parameters())


def _holder(model: nn.Module, layers: list[nn.Module]) -> nn.Module | None:
    """Return the module whose ModuleList holds the layers, bare or wrapped for activation checkpoints."""
    for module in model.modules():
        for child in module.children():
            held = child.children() if isinstance(child, nn.ModuleList) else ()
            if any(x in layers[:1] for layer in held for x in (layer, *layer.children())):
                return module
    return None


def _embeddings(base: Any, known: list[nn.Module]) -> list[nn.Module]:
    """Return the embeddings beside the layers: of tokens, and of positions if there are any."""
    inside = {id(part) for module in known for part in module.modules()}
    found = [known[0]]
    for name, child in base.named_children():
        weighty = [part for part in child.modules() if any(True for _ in part.parameters(recurse=False))]
        if all(id(part) in inside for part in weighty):
            continue
        if not isinstance(child, nn.Embedding):
            raise ValueError(
                f"sequence_parallel=True supports embeddings, layers, norms, but {type(base).__name__} holds "
                f"{name}, a {type(child).__name__}. Set sequence_parallel=False."
            )
        found.append(child)
    return found


def _keep_output(module: Any, group: dist.ProcessGroup) -> None:
    forward = module.forward

    def keeping_forward(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = forward(*args, **kwargs)
        check_slots(out.shape[1], group.size())
        return keep_own(out, group, dim=1)

    module.forward = keeping_forward


def check_slots(slots: int, ranks: int) -> None:
    """Raise ValueError if the number of slots is not a multiple of the number of ranks."""
    if slots % ranks:
        raise ValueError(
            f"{slots} slots over {ranks} tensor-parallel ranks; sequence_parallel=True wants a multiple of "
            f"{ranks}. THDBatch.collate pads with align=strategy.alignment, as THDDataModule does."
        )


def _gather_output(module: Any, group: dist.ProcessGroup, wanted: Callable[[], bool]) -> None:
    """Gather all slots of a module's output; if ``wanted()`` is false, only return a tensor of that shape."""
    forward = module.forward

    def gathering_forward(x: Tensor) -> Tensor:
        out: Tensor = forward(x)
        if wanted():
            return gather_same(out, group, dim=1)
        return out[:, :1].expand(-1, out.shape[1] * group.size(), -1)

    module.forward = gathering_forward


def _gather_and_keep(module: Any, group: dist.ProcessGroup) -> None:
    """Gather all slots for a block's input, and keep this rank's slots of its output."""
    if not has_parameters(module):  # dropout and identity: slots are independent
        return
    forward = module.forward

    def gathering_forward(*args: Any, **kwargs: Any) -> Any:
        rows = _slots_of(module, args, kwargs)

        def gathered(value: Any) -> Any:
            return gather_same(value, group, dim=1) if _is_hidden(value) and value.shape[1] == rows else value

        out = forward(*map(gathered, args), **{name: gathered(value) for name, value in kwargs.items()})
        return _own_slots(out, rows * group.size(), group)

    module.forward = gathering_forward


def _slots_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    named = (kwargs.get(name) for name in ("hidden_states", "x", "input"))
    for value in (*args, *named):
        if _is_hidden(value):
            return int(value.shape[1])
    raise ValueError(
        f"sequence_parallel=True gathers hidden states [B, slots, H] for every block, and "
        f"{type(module).__name__} was called without any. Set sequence_parallel=False."
    )


def _is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point()


def _own_slots(out: Any, slots: int, group: dist.ProcessGroup) -> Any:
    if isinstance(out, Tensor) and out.ndim == 3 and out.shape[1] == slots:
        return keep_own(out, group, dim=1)
    if isinstance(out, tuple):
        return tuple(_own_slots(value, slots, group) for value in out)
    return out
