"""A model that pools a row of tokens to one output -> one output for every sequence of a pack.

Heads of classifiers and reward models look at the first or the last token of a row, or at its mean. Here the
layers below run on the pack, and the head's own code runs on their outputs laid out as padded rows, a few
groups of similar length.

Legend: T slots in a pack, S sequences, N rows of a group, L its longest row, C labels.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_thd._static import shapes_are_static
from lightning_thd.models.pack import Pack, Scope, current_pack, current_scope, scoped
from lightning_thd.models.padded_groups import group_rows
from lightning_thd.parallel.context import layout

_HEAD = "ForSequenceClassification"
# In the names of outputs that may be one row of a whole pack.
_ONE_ROW = ("logit", "pool", "embeds", "score", "reward")
_A_ROW_A_TOKEN = re.compile(
    r"CausalLM|LMHead|MaskedLM|ForConditionalGeneration|TokenClassification|QuestionAnswering|Model$"
)


def adopt_pooled_head(model_class: Any) -> None:
    """Patch a sequence classifier or reward model to give one output a sequence of a pack."""
    forward = model_class.forward
    if _HEAD in model_class.__name__ and not hasattr(forward, "_thd_pooled"):
        # Below the guard of front_door, where there is one: it announces the pack that is pooled here.
        model_class.forward = _row_a_sequence(getattr(forward, "_thd_unguarded", forward))


def one_row_a_sequence(model: Any, pack: Pack, output: Any, *, outermost: bool) -> Any:
    """Replace what a model pooled of a whole pack by a row a sequence, or refuse it.

    Args:
        model: what returned ``output`` for a pack.
        pack: of S sequences.
        output: of transformers.
        outermost: whether no model with "thd" is around it, so that the caller sees ``output``.

    Returns:
        The output to return in place of ``output``, or None where that stays.

    Raises:
        ValueError: where one row stands for all sequences.
    """
    if may_pool(model):
        return _look_and_pool(model, pack, output, outermost=outermost)
    # The classes of transformers say in their names what they return, so a trace need not look: it would
    # take the outputs for inputs of a graph. Classes of the user's own are looked at all the same.
    if outermost and (model._thd_own_class or not torch.compiler.is_compiling()):
        refuse_one_row(model, pack, output)
    return None


def may_pool(model: Any) -> bool:
    """Return whether a model may pool a whole pack to one row, as no language model does."""
    return (
        getattr(model, "pooler", None) is not None
        or model._thd_returns_pooled
        or not _A_ROW_A_TOKEN.search(type(model).__name__)
    )


def returns_pooled(model_class: Any) -> bool:
    """Return whether a class named as a base model is annotated to pool, as CLIP's text model is."""
    if not model_class.__name__.endswith("Model"):
        return False
    annotation = inspect.signature(model_class.forward).return_annotation
    kinds = (annotation, *typing.get_args(annotation))
    fields = {name for kind in kinds for name in getattr(kind, "__dataclass_fields__", ())}
    return any(part in name for name in fields if "router" not in name for part in _ONE_ROW)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _look_and_pool(model: Any, pack: Pack, output: Any, *, outermost: bool) -> Any:
    """Pool a row a sequence, and look at what is left; outside torch.compile, which may not look."""
    pooled = a_row_a_sequence(model, pack, output)
    if outermost:
        refuse_one_row(model, pack, output)
    return pooled


def a_row_a_sequence(model: Any, pack: Pack, output: Any) -> Any:
    """Replace an encoder's pooled output ``[1, D]`` of a whole pack by one row a sequence, ``[S, D]``.

    Raises:
        ValueError: where the pooling is not known, or logits are one row for all sequences.
    """
    num_sequences = pack.cu_seqlens_q.shape[0] - 1
    logits = getattr(output, "logits", None)
    shape = logits.shape if isinstance(logits, Tensor) and logits.ndim == 2 else (0, 0)
    if num_sequences > 1 and shape[0] == 1 and shape[1] != pack.slots:  # of as many, a score a slot
        raise ValueError(
            f"{type(model).__name__} returns one row of logits for a pack of {num_sequences} sequences. Feed "
            "it padded rows, or take the hidden states of its base model and pool them by batch.unpack()."
        )
    pooled, hidden = getattr(output, "pooler_output", None), getattr(output, "last_hidden_state", None)
    pooler = getattr(model, "pooler", None)
    if pooled is None or pooler is None or hidden is None or hidden.shape[:2] != (1, pack.slots):
        return None
    starts = pack.cu_seqlens_q[:-1].long().clamp(max=pack.slots - 1)
    first = hidden[0].index_select(0, starts)[:, None]
    albert = isinstance(pooler, torch.nn.Linear) and hasattr(model, "pooler_activation")
    if not albert and "[:, 0]" not in inspect.getsource(type(pooler).forward):
        raise ValueError(
            f"{type(model).__name__} makes its pooler_output by code that cannot be repeated for every "
            f"sequence of a pack (its pooler is a {type(pooler).__name__}). Feed it padded rows, or build "
            "its base with add_pooling_layer=False and pool batch.unpack(hidden) yourself."
        )
    output.pooler_output = _pooled(model, first)
    return output


def refuse_one_row(model: Any, pack: Pack, output: Any) -> None:
    """Refuse outputs that are a single row for all sequences of a pack, under any name.

    Raises:
        ValueError: naming the output.
    """
    if isinstance(output, tuple):
        named = [(f"output {i}", value) for i, value in enumerate(output)]
    elif isinstance(output, dict):
        named = [(name, x) for name, x in output.items() if any(part in name for part in _ONE_ROW)]
    else:
        named = []
    for name, value in named:
        if not isinstance(value, Tensor) or value.ndim not in (1, 2) or not value.is_floating_point():
            continue
        a_slot_each = value.ndim == 2 and value.shape[1] == pack.slots
        if value.shape[0] == 1 and not a_slot_each and pack.cu_seqlens_q.shape[0] > 2:
            raise ValueError(
                f"{type(model).__name__} returns one row of {name}, {tuple(value.shape)}, for a pack of "
                f"{pack.cu_seqlens_q.shape[0] - 1} sequences. Feed it padded rows, leave return_dict=False "
                "out, or take the hidden states of its base model and pool them by batch.unpack()."
            )


def _pooled(base: Any, hidden: Tensor) -> Tensor:
    """Pool rows ``[N, L, D]`` to ``[N, D]`` as the base model does."""
    if isinstance(base.pooler, torch.nn.Linear):
        activated: Tensor = base.pooler_activation(base.pooler(hidden[:, 0]))
        return activated
    pooled: Tensor = base.pooler(hidden)
    return pooled


def _row_a_sequence(forward: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def forward_in_pack(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        pack = None if scope is None or scope.module is not self else current_pack()
        if pack is None:
            return forward(self, *args, **kwargs)
        return _classify(forward, self, {**dict(zip(names, args, strict=False)), **kwargs}, pack)

    forward_in_pack._thd_pooled = True  # type: ignore[attr-defined]
    return forward_in_pack


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _classify(forward: Callable[..., Any], model: Any, given: dict[str, Any], pack: Pack) -> Any:
    """Run the base model on the pack and the head once a sequence."""
    base = model.base_model
    _refuse(model, base, pack)
    labels = given.pop("labels", None)
    with _captured(base) as outputs:
        output = forward(model, **given)
    logits = output.logits if hasattr(output, "logits") else output[0]
    rows = torch.empty(len(pack.lengths), logits.shape[-1], dtype=logits.dtype, device=logits.device)
    for members, source in group_rows(pack.real_lengths, logits.device, padded=pack.lengths):
        part = _head_on_rows(forward, model, base, outputs[0], given, source, pack)
        rows = rows.index_copy(0, members, part.to(rows.dtype))
    loss = None if labels is None else _loss(model, rows, labels)
    if isinstance(output, tuple):
        return (rows,) if loss is None else (loss, rows)
    output.logits = rows
    output.loss = loss
    return output


def _refuse(model: Any, base: Any, pack: Pack) -> None:
    sharded = layout.in_use and layout.layout_of(pack.cu_seqlens_q) is not None
    if base is model or sharded or shapes_are_static() or 0 in pack.lengths:
        raise ValueError(
            f"{type(model).__name__} makes one row of every sequence, which needs whole sequences of known "
            "lengths, none of them empty: train it without context parallelism and without CUDA graphs."
        )


@contextmanager
def _captured(base: Any) -> Generator[list[Any]]:
    """Record the outputs of the base model inside this context."""
    outputs: list[Any] = []
    handle = base.register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def _head_on_rows(
    forward: Callable[..., Any],
    model: Any,
    base: Any,
    output: Any,
    given: dict[str, Any],
    source: Tensor,
    pack: Pack,
) -> Tensor:
    """Run the head's own code on padded rows ``[N, L]`` of some sequences; logits ``[N, C]``."""
    text = model.config.get_text_config()
    pad = text.pad_token_id
    filler = -1 if pad is None else pad
    real = source < pack.slots
    ids = given.get("input_ids")
    if ids is None:  # embeddings were given: any token that is no padding will do
        ids = torch.full((1, pack.slots), filler + 1, device=source.device)
    token_rows = torch.where(real, ids[0][source.clamp(max=pack.slots - 1)], filler)
    arguments = {"input_ids": token_rows, "attention_mask": real.long()}
    if "return_dict" in given:
        arguments["return_dict"] = given["return_dict"]
    scope = current_scope()
    assert scope is not None
    text.pad_token_id = filler
    base.__dict__["forward"] = lambda *_, **__: _as_rows(base, output, source, pack)
    try:
        with scoped(Scope(None, scope.outer, module=model, families=scope.families)):
            result = forward(model, **arguments)
    finally:
        del base.__dict__["forward"]
        text.pad_token_id = pad
    logits: Tensor = result.logits if hasattr(result, "logits") else result[0]
    return logits


def _as_rows(base: Any, output: Any, source: Tensor, pack: Pack) -> Any:
    """Arrange the base model's output as padded rows, and pool them again."""

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:2] != (1, pack.slots):
            return None
        padded = torch.cat([value[0], value.new_zeros(1, *value.shape[2:])])
        return padded[source]

    if isinstance(output, tuple):
        hidden = rows(output[0])
        return (hidden, _pooled(base, hidden)) if getattr(base, "pooler", None) is not None else (hidden,)
    made = type(output)(**{name: rows(value) for name, value in output.items()})
    if getattr(base, "pooler", None) is not None and hasattr(made, "pooler_output"):
        made.pooler_output = _pooled(base, made.last_hidden_state)
    return made


def _loss(model: Any, rows: Tensor, labels: Tensor) -> Tensor:
    """Compute the class's own loss over the first sequences of the pack, those that have a label."""
    from transformers.loss.loss_utils import ForSequenceClassificationLoss

    if labels.shape[0] > rows.shape[0]:
        raise ValueError(
            f"{type(model).__name__} got {labels.shape[0]} labels for a pack of {rows.shape[0]} sequences. "
            "Pass one label a sequence, in the order of the pack; a trailing padding sequence needs none."
        )
    loss: Tensor = ForSequenceClassificationLoss(labels, rows[: labels.shape[0]], model.config)
    return loss
