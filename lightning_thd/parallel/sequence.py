"""A tensor-parallel model -> the same model, whose ranks each hold a part of the slots between blocks.

Norms, residuals and dropout then work on T / tp slots, which saves memory. Every attention or feed-forward
block of a layer gathers its input, and keeps only this rank's slots of its output.
Legend: T slots of the pack, or of its context-parallel shard; tp tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd._find import has_parameters
from lightning_thd.parallel.exchange import gather_same, keep_own
from lightning_thd.parallel.fsdp import layers_of, towers_of
from lightning_thd.parallel.pipeline.stage import PassThrough, Stage, stage_of
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
    decoder = _holder(model, layers)
    beside_layers = [] if decoder is None else list(decoder.children())
    norms = [child for child in beside_layers if _is_norm(child) or isinstance(child, PassThrough)]
    if not layers or embedding is None or len(norms) != 1:
        raise ValueError(
            f"sequence_parallel=True wants layers, an embedding and one last norm; {type(model).__name__} "
            f"has {len(layers)} layers, {len(norms)} norms beside them, {'an' if embedding else 'no'} "
            "embedding. Set sequence_parallel=False."
        )

    for module in _embeddings(decoder, embedding, [norms[0], *layers]):
        _keep_output(module, group)
    for layer in layers:
        _share_slots_in(layer, group)
    _gather_after(norms[0], stage_of(model), group)


def _share_slots_in(layer: nn.Module, group: dist.ProcessGroup) -> None:
    """Let norms of a layer run on this rank's slots, and let blocks gather all slots for their input."""
    of_layer = [name for name, _ in layer.named_parameters(recurse=False)]
    if of_layer:
        raise ValueError(
            f"sequence_parallel=True supports norms and blocks, but {type(layer).__name__} holds {of_layer} "
            "itself. Set sequence_parallel=False."
        )
    for child in layer.children():
        for block in child if isinstance(child, nn.ModuleList) else [child]:
            if _is_norm(block):
                sum_own_gradients(block, group)
            else:
                _gather_and_keep(block, group)


def _gather_after(norm: nn.Module, stage: Stage | None, group: dist.ProcessGroup) -> None:
    """Gather all slots for the head behind the last norm, or a stand-in on a stage without a head."""
    if isinstance(norm, PassThrough):  # a pipeline stage without the last norm
        _gather_output(norm, group, lambda: False)
        return
    sum_own_gradients(norm, group)
    _gather_output(norm, group, lambda: stage is None or stage.holds_head)


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm, whose weights are vectors."""
    return "norm" in type(module).__name__.lower() and all(p.ndim == 1 for p in module.parameters())


def _holder(model: nn.Module, layers: list[nn.Module]) -> nn.Module | None:
    """Return the module whose ModuleList holds the layers, bare or wrapped for activation checkpoints."""
    if not layers:
        return None
    for module in model.modules():
        for child in module.children():
            if not isinstance(child, nn.ModuleList):
                continue
            bare_or_wrapped = (part for layer in child.children() for part in (layer, *layer.children()))
            if any(part is layers[0] for part in bare_or_wrapped):
                return module
    return None


def _embeddings(decoder: Any, embedding: nn.Module, others: list[nn.Module]) -> list[nn.Module]:
    """Return the embeddings of a decoder: of tokens, and of positions if there are any.

    ``others`` are its layers and its norm; a decoder with weights in anything else is refused.
    """
    in_place = {id(part) for module in (embedding, *others) for part in module.modules()}
    embeddings = [embedding]
    for name, child in decoder.named_children():
        with_weights = [part for part in child.modules() if any(True for _ in part.parameters(recurse=False))]
        if all(id(part) in in_place for part in with_weights):
            continue
        if not isinstance(child, nn.Embedding):
            raise ValueError(
                f"sequence_parallel=True supports embeddings, layers, norms, but {type(decoder).__name__} "
                f"holds {name}, a {type(child).__name__}. Set sequence_parallel=False."
            )
        embeddings.append(child)
    return embeddings


def _keep_output(module: Any, group: dist.ProcessGroup) -> None:
    """Keep this rank's slots of a module's output ``[B, T, H]``."""
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
        # A view of all slots' shape, without memory: a stage without the head takes only its shape.
        return out[:, :1].expand(-1, out.shape[1] * group.size(), -1)

    module.forward = gathering_forward


def _gather_and_keep(module: Any, group: dist.ProcessGroup) -> None:
    """Gather all slots for a block's input, and keep this rank's slots of its output."""
    if not has_parameters(module):  # dropout and identity: slots are independent
        return
    forward = module.forward

    def gathering_forward(*args: Any, **kwargs: Any) -> Any:
        slots = _slots_of(module, args, kwargs)

        def gathered(value: Any) -> Any:
            if _is_hidden(value) and value.shape[1] == slots:
                return gather_same(value, group, dim=1)
            return value

        out = forward(
            *[gathered(value) for value in args],
            **{name: gathered(value) for name, value in kwargs.items()},
        )
        return _own_slots(out, slots * group.size(), group)

    module.forward = gathering_forward


def _slots_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of slots of the hidden states that a block is called with."""
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
    """Keep this rank's slots of every output ``[B, slots, H]``, also in tuples."""
    if isinstance(out, Tensor) and out.ndim == 3 and out.shape[1] == slots:
        return keep_own(out, group, dim=1)
    if isinstance(out, tuple):
        return tuple(_own_slots(value, slots, group) for value in out)
    return out
