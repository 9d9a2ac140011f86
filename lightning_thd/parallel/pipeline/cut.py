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
    if (known := stage_of(inner)) is not None:
        return known
    path, parent, layers = decoder_stack(inner)
    before, behind = _around(inner, parent, layers)
    _refuse_shared(inner, layers)
    found = plan_split(inner, channel.ranks, stages_per_rank=stages_per_rank, split=split)
    stage = Stage(found, channel, _on_meta(inner), draws=has_dropout(inner))
    parent._modules[path.rpartition(".")[2]] = StageLayers(layers, stage)
    first, last = channel.rank == 0, channel.rank == channel.ranks - 1
    for name, embedding in before.items():
        absent = NoEmbedding(embedding, stage)
        if first:
            _run_only_if(lambda: stage.holds_embedding, embedding, absent)
        else:
            parent._modules[name] = absent
    for name, module in behind.items():
        if last:
            _run_only_if(lambda: stage.holds_head, module, PassThrough())
        else:
            parent._modules[name] = PassThrough()
        _require_behind(name, parent, stage)
    head = inner.get_output_embeddings()
    if last:
        head.register_forward_hook(stage.share_logits)
    else:
        dtype = getattr(getattr(head, "weight", None), "dtype", torch.float32)
        rows = getattr(head, "out_features", 0) or inner.config.get_text_config(decoder=True).vocab_size
        inner.set_output_embeddings(NoHead(rows, stage, dtype))
    inner.__dict__[STAGE] = stage
    if routers_of(inner):
        stage.balance = RouterRelay(channel if balance is None else balance(), stage, peers)
        if wants_balance(inner):
            leave_to_losses(inner)
    return stage


def language_model_of(model: nn.Module) -> Any:
    """Return the Hugging Face model with a head, which may be inside wrappers such as PEFT's."""
    found = model_with_head(model)
    if found is not None:
        return found
    raise ValueError(
        "pipeline_parallel_size > 1 cuts Hugging Face causal language models, and "
        f"{type(model).__name__} holds none (looked for a module with config and get_output_embeddings())."
    )


def decoder_stack(inner: Any) -> tuple[str, nn.Module, nn.ModuleList]:
    """Return the name of a model's list of decoder layers, the module that holds the list, and the list."""
    wanted: int = getattr(inner.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    lists = {name: m for name, m in inner.named_modules() if isinstance(m, nn.ModuleList)}
    found = {name: m for name, m in lists.items() if len(m) == wanted and has_parameters(m)}
    outermost = [n for n in found if not any(n.startswith(f"{other}.") for other in found if other != n)]
    if len(outermost) != 1:
        seen = ", ".join(f"{name} ({len(m)})" for name, m in lists.items()) or "none at all"
        raise ValueError(
            f"pipeline_parallel_size > 1 needs one nn.ModuleList of num_hidden_layers={wanted} decoder "
            f"layers in {type(inner).__name__}; its lists are {seen}. Set pipeline_parallel_size=1."
        )
    path = outermost[0]
    return path, inner.get_submodule(path.rpartition(".")[0]), found[path]


def _around(
    inner: Any, parent: nn.Module, layers: nn.ModuleList
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return the modules with parameters before and behind the layers, except the head, by name."""
    head, seen_layers = inner.get_output_embeddings(), False
    before: dict[str, nn.Module] = {}
    behind: dict[str, nn.Module] = {}
    for name, child in parent._modules.items():
        seen_layers = seen_layers or child is layers
        if child is None or child in (layers, head) or not has_parameters(child):
            continue
        if not seen_layers and not isinstance(child, nn.Embedding):
            raise ValueError(
                f"{type(inner).__name__} has {name} ({type(child).__name__}) before its layers, wanted "
                "only embeddings. Set pipeline_parallel_size=1."
            )
        (behind if seen_layers else before)[name] = child
    known = (layers, head, *before.values(), *behind.values())
    placed = {id(p) for module in known for p in module.parameters()}
    left = [name for name, p in inner.named_parameters() if id(p) not in placed]
    if left:
        raise ValueError(
            f"{type(inner).__name__} has parameters outside its embedding, layers, final norm and head: "
            f"{left[:4]}. Their pipeline stage is not known. Set pipeline_parallel_size=1."
        )
    return before, behind


def _refuse_shared(inner: Any, layers: nn.ModuleList) -> None:
    seen: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            other = seen.setdefault(id(parameter), index)
            if other != index:
                raise ValueError(
                    f"Layers {other} and {index} of {type(inner).__name__} share {name}, but pipeline stages "
                    "cannot share weights. Set pipeline_parallel_size=1."
                )
    config = inner.config.get_text_config(decoder=True)
    needed = {"num_kv_shared_layers": "keys of earlier layers", "hidden_size_per_layer_input": "embeddings"}
    for option, inputs in needed.items():
        if value := getattr(config, option, None):
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
    layers = decoder_stack(inner)[2]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    head, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    around = [sum(p.numel() for p in module.parameters()) for module in (embedding, head)]
    counted = layer_flops(inner.config, len(layers), _LENGTHS)
    if counted is None:  # take 6 FLOPs per parameter and token; embeddings cost none
        flops = [6.0 * sum(_LENGTHS) * size for size in sizes]
        counted = flops, 0.0, 6.0 * sum(_LENGTHS) * around[1]
    return split_layers(
        [LayerCost(flops=f, parameters=n) for f, n in zip(counted[0], sizes, strict=True)],
        ranks=ranks,
        stages_per_rank=stages_per_rank,
        embedding=LayerCost(flops=counted[1], parameters=around[0]),
        head=LayerCost(flops=counted[2], parameters=around[1]),
        split=split,
    )


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map a tied weight's name in the head to its name in the embedding; call this before the cut."""
    inner = language_model_of(model)
    ends = (inner.get_output_embeddings(), inner.get_input_embeddings())
    weights = [getattr(end, "weight", None) for end in ends]
    if weights[0] is None or weights[0] is not weights[1]:
        return {}
    paths = {module: name for name, module in model.named_modules()}
    named = [item for end in ends for item in end.named_parameters(prefix=paths[end])]
    head, embedding = (name for name, parameter in named if parameter is weights[0])
    return {head: embedding}


def stages_in(model: nn.Module) -> Iterator[Stage]:
    """Yield the ``Stage`` of every model in ``model`` that was cut into pipeline stages."""
    for module in model.modules():
        if (stage := stage_of(module)) is not None:
            yield stage


def _on_meta(inner: nn.Module) -> nn.Module:
    """Copy a model to the meta device, to count the FLOPs and parameters of all stages later."""
    memo: dict[int, Any] = {}
    for tensor in [*inner.parameters(), *inner.buffers()]:
        empty: Any = torch.empty_like(tensor.detach(), device="meta")
        trained = tensor.requires_grad
        memo[id(tensor)] = nn.Parameter(empty, trained) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(inner, memo)


def _run_only_if(held: Callable[[], bool], module: Any, instead: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs) if held() else instead(*args, **kwargs)


def _require_behind(name: str, owner: nn.Module, stage: Stage) -> None:
    """Make a module raise, on every stage, if it runs before the layers instead of after them."""
    module: Any = owner._modules[name]

    def check(module: nn.Module, args: Any) -> None:
        if not stage.in_layers:
            raise ValueError(
                f"{type(owner).__name__} runs {name} before its layers, wanted only embeddings. Set "
                "pipeline_parallel_size=1."
            )

    module.register_forward_pre_hook(check)
