"""A transformers model -> its tensor-parallel plan, checked against the number of heads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_thd.parallel.fsdp import layers_of

# Blocks whose projections stay on the heads of their rank from product to product: tested family by family.
_CUT_HEADS = frozenset({"bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h"})
# Projections that end a block, by the names transformers gives them.
_ROWS = frozenset({"o_proj", "out_proj", "down_proj", "w2", "fc2", "proj_down", "output_linear"})
_PRODUCTS = (
    {"gate_proj", "up_proj", "down_proj"},
    {"up_proj", "down_proj"},
    {"w1", "w2", "w3"},
    {"proj_up_gate", "proj_up", "proj_down"},
)


def model_plan(model: nn.Module, ranks: int = 1) -> dict[str, str]:
    """Return a model's tensor-parallel plan: which weights are cut, and how.

    Args:
        model: a PreTrainedModel.
        ranks: tensor-parallel ranks; what they do not divide and transformers does not plan stays whole.

    Returns:
        transformers' own plan, its experts shared out where it has an expert-parallel plan alone, and one of
        ours for products of the layers that it leaves out: names below ``model`` to words of
        ``apply_tensor_parallel``. Weights that are tied to the head are cut like it.

    Raises:
        ValueError: when nothing of its layers can be cut.
    """
    theirs: dict[str, str] = {**_experts_of(model, ranks), **(getattr(model, "_tp_plan", None) or {})}
    plan = {**_own_plan(model, theirs, ranks), **theirs}
    if not any("layers" in name or "*" in name for name in plan):
        raise ValueError(
            f"{type(model).__name__} comes without a tensor-parallel plan for its layers, and none of their "
            "products can be cut without one. Pass a plan as tensor_parallel_plan={"
            "'model.layers.*.self_attn.q_proj': 'colwise', ...}, or set tensor_parallel_size=1."
        )
    embedding, head = _name_of(model, "get_input_embeddings"), _name_of(model, "get_output_embeddings")
    tied = embedding is not None and head is not None and _tied(model)
    if tied and head in plan:
        assert embedding is not None
        plan[embedding] = "embedding_rowwise"
    elif tied and embedding in plan:
        assert head is not None
        plan[head] = "colwise_gather_output"
    return plan


def _experts_of(model: nn.Module, ranks: int) -> dict[str, str]:
    """Return a plan for a model's experts, if ranks divide the number of experts of every layer."""
    plan: dict[str, str] = {}
    for name, style in (getattr(model, "_ep_plan", None) or {}).items():
        pattern = re.compile(re.escape(name).replace(r"\*", r"\d+") + "$")
        found: list[Any] = [module for path, module in model.named_modules() if pattern.match(path)]
        counts = [getattr(module, "num_experts", None) for module in found]
        whole = all(
            isinstance(count, int) and value is not None and value.shape[:1] == (count,)
            for module, count in zip(found, counts, strict=True)
            for value in module._parameters.values()
        )
        if style == "ep_dispatch_experts" and found and whole and all(n % ranks == 0 for n in counts if n):
            plan[name] = "moe_tp_experts"
    return plan


def _own_plan(model: nn.Module, theirs: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return a plan for products that transformers' plan leaves out: layers, embedding and head.

    A product whose columns are gathered, or whose input every rank has whole, is the whole one whatever the
    block does around it. State-space and convolution blocks stay whole: kernels read their weights directly.
    """
    planned = [re.compile(re.escape(name).replace(r"\*", r"\d+") + "$") for name in theirs]
    names = {module: name for name, module in model.named_modules()}
    cut_heads = getattr(getattr(model, "config", None), "model_type", None) in _CUT_HEADS
    plan: dict[str, str] = {}
    for layer in layers_of(model):
        for block in layer.modules():
            for name, style in _styles(block, ranks, cut_heads=cut_heads).items():
                full = f"{names[block]}.{name}"
                if not any(pattern.match(full) for pattern in planned):
                    plan[full] = style
    if not plan:
        return plan
    embedding, head = _name_of(model, "get_input_embeddings"), _name_of(model, "get_output_embeddings")
    modules = dict(model.named_modules())
    vocabulary: dict[str | None, str] = {embedding: "embedding_rowwise", head: "colwise_gather_output"}
    for part, style in vocabulary.items():
        module: Any = modules.get(part or "")
        if isinstance(module, nn.Embedding | nn.Linear) and module.weight.shape[0] % ranks == 0:
            plan[str(part)] = style
    return plan


def _styles(block: nn.Module, ranks: int, *, cut_heads: bool) -> dict[str, str]:
    """Return tensor-parallel styles for the products that are direct children of a block."""
    children = dict(block.named_children())
    convolves = any(isinstance(child, nn.Conv1d) for child in children.values())
    if convolves or set(block._parameters) - {"sinks"}:
        return {}
    found = {name: child for name, child in children.items() if isinstance(child, nn.Linear)}
    plain = not any(True for name, child in children.items() if name not in found for _ in child.parameters())
    products = set(found) in _PRODUCTS and plain
    heads = cut_heads and {"q_proj", "k_proj", "v_proj"} <= set(found) and plain
    styles = {}
    for name, child in found.items():
        row = name in _ROWS
        if child.weight.shape[1 if row else 0] % ranks == 0:
            style = "rowwise" if row else "colwise"
            alone = "rowwise_split_input" if row else "colwise_gather_output"
            styles[name] = style if products or heads else alone
    # Of a block that works on its part between products all are cut, or none.
    return styles if not (products or heads) or len(styles) == len(found) else {}


def check_heads(model: nn.Module, ranks: int, plan: Mapping[str, str]) -> None:
    """Refuse head counts that the tensor-parallel ranks do not divide, where a plan cuts heads.

    Raises:
        ValueError: naming the number.
    """
    config: Any = getattr(model, "config", None)
    products = set().union(*_PRODUCTS)
    cut = [name for name, style in plan.items() if style == "colwise" and name.split(".")[-1] not in products]
    if config is None or not cut:
        return
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(
                f"{type(model).__name__} has {name}={heads}, which {ranks} tensor-parallel ranks do not "
                f"divide; wanted a multiple of {ranks}. Lower tensor_parallel_size and raise "
                "context_parallel_size or data_parallel_size."
            )


def _tied(model: Any) -> bool:
    return getattr(model.get_input_embeddings(), "weight", None) is getattr(
        model.get_output_embeddings(), "weight", 0
    )


def _name_of(model: Any, getter: str) -> str | None:
    wanted = getattr(model, getter, lambda: None)()
    return next((name for name, module in model.named_modules() if module is wanted), None)
