"""A whole model -> this rank's part of it, in place, before the strategy moves any weight.

The embedding stays on the first stage. The head and the modules after the layers stay on the last stage. The
other ranks get placeholders without parameters. Modules that stay keep their names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_thd._find import has_parameters, model_with_head
from lightning_thd.parallel.draws import has_dropout
from lightning_thd.parallel.pipeline.channel import Channel
from lightning_thd.parallel.pipeline.split import LayerCost, Split, layer_flops, split_layers
from lightning_thd.parallel.pipeline.stage import (
    STAGE,
    NoEmbedding,
    NoHead,
    PassThrough,
    Stage,
    StageLayers,
    stage_of,
)
from lightning_thd.parallel.routers import RouterRelay, leave_to_losses, routers_of, scores_of, wants_balance

_LENGTHS = (4096, 2048, 1024, 512, 512)  # stages are balanced for a pack of these lengths, in tokens


def cut_model(
    model: nn.Module,
    channel: Channel,
    *,
    stages_per_rank: int = 1,
    split: Literal["auto"] | Sequence[int] = "auto",
    balance: Callable[[], Channel] | None = None,
    peers: dist.ProcessGroup | None = None,
) -> Stage:
    """Replace the modules of other ranks by placeholders, once and in place; return this rank's ``Stage``.

    For a mixture of experts, ``balance`` makes the channel for router sums between stages. ``peers`` are the
    ranks that hold the same layers; balancing losses add the router sums of these ranks.
    """
    inner = language_model_of(model)
    cut_before = stage_of(inner)
    if cut_before is not None:
        return cut_before

    path, decoder, layers = decoder_stack(inner)
    before, behind = _around(inner, decoder, layers)
    _refuse_shared(inner, layers)
    plan = plan_split(inner, channel.ranks, stages_per_rank=stages_per_rank, split=split)
    stage = Stage(plan, channel, _on_meta(inner), draws=has_dropout(inner))

    setattr(decoder, path.rpartition(".")[2], StageLayers(layers, stage))
    _cut_before(decoder, before, stage)
    _cut_behind(decoder, behind, stage)
    _cut_head(inner, stage)
    inner.__dict__[STAGE] = stage

    if routers_of(inner):
        stage.balance = RouterRelay(channel if balance is None else balance(), stage, peers)
        if wants_balance(inner):
            leave_to_losses(inner)
    return stage


def _cut_before(decoder: nn.Module, embeddings: dict[str, nn.Module], stage: Stage) -> None:
    """Keep the embeddings on the first rank, for passes through its first chunk."""
    for name, embedding in embeddings.items():
        absent = NoEmbedding(embedding, stage)
        if stage.channel.rank == 0:
            _run_only_if(lambda: stage.holds_embedding, embedding, absent)
        else:
            setattr(decoder, name, absent)


def _cut_behind(decoder: nn.Module, modules: dict[str, nn.Module], stage: Stage) -> None:
    """Keep the modules behind the layers on the last rank, for passes through its last chunk."""
    for name, module in modules.items():
        if stage.is_on_last_rank:
            _run_only_if(lambda: stage.holds_head, module, PassThrough())
        else:
            setattr(decoder, name, PassThrough())
        _require_behind(name, decoder, stage)


def _cut_head(inner: Any, stage: Stage) -> None:
    """Keep the head on the last rank."""
    head = inner.get_output_embeddings()
    if stage.is_on_last_rank:
        head.register_forward_hook(stage.share_logits)
        return
    dtype = getattr(getattr(head, "weight", None), "dtype", torch.float32)
    rows = getattr(head, "out_features", 0) or inner.config.get_text_config(decoder=True).vocab_size
    inner.set_output_embeddings(NoHead(rows, stage, dtype))


def language_model_of(model: nn.Module) -> Any:
    """Return the Hugging Face model with a head, which may be inside wrappers such as PEFT's."""
    inner = model_with_head(model)
    if inner is not None:
        return inner
    raise ValueError(
        "pipeline_parallel_size > 1 cuts Hugging Face causal language models, and "
        f"{type(model).__name__} holds none (looked for a module with config and get_output_embeddings())."
    )


def decoder_stack(inner: Any) -> tuple[str, nn.Module, nn.ModuleList]:
    """Return the name of a model's list of decoder layers, the module that holds the list, and the list."""
    num_layers: int = getattr(inner.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    lists = {name: module for name, module in inner.named_modules() if isinstance(module, nn.ModuleList)}
    stacks = {
        name: module for name, module in lists.items() if len(module) == num_layers and has_parameters(module)
    }

    # A layer may hold a list of as many parts, such as experts.
    outermost = [name for name in stacks if not any(name.startswith(f"{other}.") for other in stacks)]
    if len(outermost) != 1:
        seen = ", ".join(f"{name} ({len(module)})" for name, module in lists.items()) or "none at all"
        raise ValueError(
            f"pipeline_parallel_size > 1 needs one nn.ModuleList of num_hidden_layers={num_layers} decoder "
            f"layers in {type(inner).__name__}; its lists are {seen}. Set pipeline_parallel_size=1."
        )

    path = outermost[0]
    return path, inner.get_submodule(path.rpartition(".")[0]), stacks[path]


def _around(
    inner: Any, decoder: nn.Module, layers: nn.ModuleList
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return the modules with parameters before and behind the layers, except the head, by name."""
    head = inner.get_output_embeddings()
    before: dict[str, nn.Module] = {}
    behind: dict[str, nn.Module] = {}
    side = before
    for name, child in decoder.named_children():
        if child is layers:
            side = behind
        if child in (layers, head) or not has_parameters(child):
            continue
        if side is before and not isinstance(child, nn.Embedding):
            raise ValueError(
                f"{type(inner).__name__} has {name} ({type(child).__name__}) before its layers, wanted "
                "only embeddings. Set pipeline_parallel_size=1."
            )
        side[name] = child

    in_place = [layers, *before.values(), *behind.values()]
    if head is not None:
        in_place.append(head)
    on_a_stage = {id(parameter) for module in in_place for parameter in module.parameters()}
    nowhere = [name for name, p in inner.named_parameters() if id(p) not in on_a_stage]
    if nowhere:
        raise ValueError(
            f"{type(inner).__name__} has parameters outside its embedding, layers, final norm and head: "
            f"{nowhere[:4]}. Their pipeline stage is not known. Set pipeline_parallel_size=1."
        )
    return before, behind


def _refuse_shared(inner: Any, layers: nn.ModuleList) -> None:
    """Refuse layers that need weights, values or sums of other stages' layers."""
    first_layer: dict[int, int] = {}  # id of a parameter -> the first layer that has it
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            other = first_layer.setdefault(id(parameter), index)
            if other != index:
                raise ValueError(
                    f"Layers {other} and {index} of {type(inner).__name__} share {name}, but pipeline stages "
                    "cannot share weights. Set pipeline_parallel_size=1."
                )

    config = inner.config.get_text_config(decoder=True)
    needed = {"num_kv_shared_layers": "keys of earlier layers", "hidden_size_per_layer_input": "embeddings"}
    for option, inputs in needed.items():
        value = getattr(config, option, None)
        if value:
            raise ValueError(
                f"{type(inner).__name__} has {option}={value!r}: its layers use {inputs} from other "
                "pipeline stages. Set pipeline_parallel_size=1."
            )

    if wants_balance(inner) and scores_of(inner) is None:
        raise ValueError(
            f"{type(inner).__name__} has output_router_logits=True: its balancing loss needs the routers of "
            "all stages, and the formula of that loss is not known. Set config.output_router_logits=False."
        )


def plan_split(
    inner: Any, ranks: int, *, stages_per_rank: int = 1, split: Literal["auto"] | Sequence[int] = "auto"
) -> Split:
    """Choose the layers of each stage as ``split`` says; "auto" balances FLOPs first, parameters second."""
    _, _, layers = decoder_stack(inner)
    sizes = [_num_parameters(layer) for layer in layers]
    embedding_size = _num_parameters(inner.get_input_embeddings())
    head_size = _num_parameters(inner.get_output_embeddings())

    flops_of_parts = layer_flops(inner.config, len(layers), _LENGTHS)
    if flops_of_parts is not None:
        flops, embedding_flops, head_flops = flops_of_parts
    else:  # take 6 FLOPs per parameter and token; embeddings cost none
        flops_of_parameter = 6.0 * sum(_LENGTHS)
        flops = [flops_of_parameter * size for size in sizes]
        embedding_flops = 0.0
        head_flops = flops_of_parameter * head_size
    return split_layers(
        [LayerCost(flops=cost, parameters=size) for cost, size in zip(flops, sizes, strict=True)],
        ranks=ranks,
        stages_per_rank=stages_per_rank,
        embedding=LayerCost(flops=embedding_flops, parameters=embedding_size),
        head=LayerCost(flops=head_flops, parameters=head_size),
        split=split,
    )


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map a tied weight's name in the head to its name in the embedding; call this before the cut."""
    inner = language_model_of(model)
    head = inner.get_output_embeddings()
    embedding = inner.get_input_embeddings()
    weight: Any = getattr(head, "weight", None)
    if weight is None or weight is not getattr(embedding, "weight", None):
        return {}
    return {_name_in(model, head, weight): _name_in(model, embedding, weight)}


def _name_in(model: nn.Module, end: nn.Module, weight: Any) -> str:
    """Return the name that a weight has in a model as part of the module ``end``."""
    path = next(name for name, module in model.named_modules() if module is end)
    return next(name for name, parameter in end.named_parameters(prefix=path) if parameter is weight)


def stages_in(model: nn.Module) -> Iterator[Stage]:
    """Yield the ``Stage`` of every model in ``model`` that was cut into pipeline stages."""
    for module in model.modules():
        stage = stage_of(module)
        if stage is not None:
            yield stage


def _on_meta(inner: nn.Module) -> nn.Module:
    """Copy a model to the meta device, to count the FLOPs and parameters of all stages later."""
    copies: dict[int, Any] = {}  # by id, as deepcopy looks them up, so that no weight is copied
    for tensor in [*inner.parameters(), *inner.buffers()]:
        empty = torch.empty_like(tensor.detach(), device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        copies[id(tensor)] = empty
    return copy.deepcopy(inner, copies)


def _run_only_if(held: Callable[[], bool], module: Any, instead: nn.Module) -> None:
    """Let ``instead`` run in place of a module in passes in which ``held()`` is false."""
    forward = module.forward

    def forward_if_held(*args: Any, **kwargs: Any) -> Any:
        if held():
            return forward(*args, **kwargs)
        return instead(*args, **kwargs)

    module.forward = forward_if_held


def _require_behind(name: str, owner: nn.Module, stage: Stage) -> None:
    """Make a module raise, on every stage, if it runs before the layers instead of after them."""
    module = owner.get_submodule(name)

    def check(module: nn.Module, args: Any) -> None:
        if not stage.in_layers:
            raise ValueError(
                f"{type(owner).__name__} runs {name} before its layers, wanted only embeddings. Set "
                "pipeline_parallel_size=1."
            )

    module.register_forward_pre_hook(check)
