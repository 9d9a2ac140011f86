"""A transformers model -> its tensor-parallel plan, checked against the number of heads."""

from __future__ import annotations

from typing import Any

from torch import nn


def model_plan(model: nn.Module) -> dict[str, str]:
    """Ask a model how its weights are to be cut.

    Args:
        model: a PreTrainedModel.

    Returns:
        Names below ``model`` to words of ``apply_tensor_parallel``. Weights that are tied to the head are cut
        like it.

    Raises:
        ValueError: when the model does not say for its layers.
    """
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    if not any("layers" in name or "*" in name for name in plan):
        raise ValueError(
            f"{type(model).__name__} comes without a tensor-parallel plan for its layers. Pass one as "
            "tensor_parallel_plan={'model.layers.*.self_attn.q_proj': 'colwise', ...}, or set "
            "tensor_parallel_size=1."
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


def check_heads(model: nn.Module, ranks: int) -> None:
    """Refuse heads that do not divide, before any collective.

    Raises:
        ValueError: naming the number.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
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
