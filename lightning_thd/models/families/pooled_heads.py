"""A model that pools a row of tokens to one output -> one output for every sequence of a pack.

Heads of classifiers and reward models read single tokens of a row, or the mean of the row. The layers below
the head run on the pack. Their outputs become padded rows, in groups of similar length, for the head.
Legend: T slots in a pack, N rows of a group, L slots of its longest row, D hidden size.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_thd._static import shapes_are_static
from lightning_thd.batch.upload import uploaded
from lightning_thd.boundaries import Boundaries
from lightning_thd.models.families.padded_groups import padded_rows
from lightning_thd.models.pack import Scope, current_scope, scoped

# An output whose name has one of these parts may be pooled to one row for all sequences of a pack.
_POOLED_OUTPUTS = ("logit", "pool", "embeds", "score", "reward")
# Names of classes that have an output per token.
_TOKEN_LEVEL = re.compile(
    r"CausalLM|LMHead|MaskedLM|ForConditionalGeneration|TokenClassification|QuestionAnswering|Model$"
)


def class_pools(model_class: Any) -> bool:
    """Return whether a class may pool a pack: by its name or, for a ``...Model``, by its outputs' names."""
    if not _TOKEN_LEVEL.search(model_class.__name__):
        return True
    if not model_class.__name__.endswith("Model"):
        return False
    annotation = inspect.signature(model_class.forward).return_annotation
    kinds = (annotation, *typing.get_args(annotation))
    fields = {name for kind in kinds for name in getattr(kind, "__dataclass_fields__", ())}
    return any(part in name for name in fields if "router" not in name for part in _POOLED_OUTPUTS)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def pool_each_sequence(model: Any, pack: Boundaries, output: Any, *, outermost: bool) -> Any:
    """Replace an encoder's ``pooler_output`` ``[1, D]`` by a row per sequence; return None if it has none."""
    pooled = _pool(model, pack, output)
    if outermost:
        refuse_pooled_pack(model, pack, output)
    return pooled


def _pool(model: Any, pack: Boundaries, output: Any) -> Any:
    """Run the pooler on every sequence's first token; refuse pooled logits and poolers of another kind."""
    num_sequences = pack.offsets.shape[0] - 1
    logits = getattr(output, "logits", None)
    shape = logits.shape if isinstance(logits, Tensor) and logits.ndim == 2 else (0, 0)
    if num_sequences > 1 and shape[0] == 1 and shape[1] != pack.slots:  # [1, T] is one score per slot
        raise ValueError(
            f"{type(model).__name__} returns one row of logits for a pack of {num_sequences} sequences. "
            "Feed it padded rows, or pool the hidden states of its base model by batch.unpack()."
        )

    pooled = getattr(output, "pooler_output", None)
    hidden = getattr(output, "last_hidden_state", None)
    pooler = getattr(model, "pooler", None)
    if pooled is None or pooler is None or hidden is None or hidden.shape[:2] != (1, pack.slots):
        return None

    albert = isinstance(pooler, torch.nn.Linear) and hasattr(model, "pooler_activation")
    if not albert and not _reads_first_token(pooler, hidden):
        raise ValueError(
            f"{type(model).__name__} makes its pooler_output by code that cannot be repeated for every "
            f"sequence of a pack (its pooler is a {type(pooler).__name__}). Feed it padded rows."
        )

    pack.require("pooled", model)
    starts = pack.offsets[:-1].long().clamp(max=pack.slots - 1)
    output.pooler_output = _run_pooler(model, hidden[0].index_select(0, starts)[:, None])
    return output


@torch.no_grad()
def _reads_first_token(pooler: Any, hidden: Tensor) -> bool:
    """Return whether a pooler reads a row's first token only; it is tried once, on two slots of a pack."""
    if "_thd_first_token" not in pooler.__dict__ and hidden.shape[1] > 1:
        training = pooler.training
        pooler.eval()  # no dropout
        try:
            same = torch.equal(pooler(hidden[:, :2]), pooler(hidden[:, :1]))
        finally:
            pooler.train(training)
        pooler.__dict__["_thd_first_token"] = same
    return bool(pooler.__dict__.get("_thd_first_token", True))


def _run_pooler(base: Any, hidden: Tensor) -> Tensor:
    """Pool rows ``[N, L, D]`` to ``[N, D]`` as the base model does."""
    pooled: Tensor
    if isinstance(base.pooler, torch.nn.Linear):  # ALBERT keeps the pooler's activation beside it
        pooled = base.pooler_activation(base.pooler(hidden[:, 0]))
    else:
        pooled = base.pooler(hidden)
    return pooled


def refuse_pooled_pack(model: Any, pack: Boundaries, output: Any) -> None:
    """Refuse one row for all sequences: in a dict only outputs of ``_POOLED_OUTPUTS``."""
    named: list[tuple[str, Any]] = []
    if isinstance(output, tuple | Tensor):
        outputs = output if isinstance(output, tuple) else (output,)
        named = [(f"output {i}", value) for i, value in enumerate(outputs)]
    elif isinstance(output, dict):
        named = [(name, x) for name, x in output.items() if any(part in name for part in _POOLED_OUTPUTS)]

    for name, value in named:
        if not isinstance(value, Tensor) or value.ndim not in (1, 2) or not value.is_floating_point():
            continue
        pooled = "pool" in name or "embeds" in name  # such an output never has one value per slot
        one_value_a_slot = value.ndim == 2 and value.shape[1] == pack.slots and not pooled
        if value.shape[0] == 1 and not one_value_a_slot and pack.offsets.shape[0] > 2:
            raise ValueError(
                f"{type(model).__name__} returns one row of {name}, {tuple(value.shape)}, for a pack of "
                f"{pack.offsets.shape[0] - 1} sequences. Feed it padded rows."
            )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def classify(
    model: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], pack: Boundaries
) -> Any:
    """Run a sequence classifier or reward model, and return one output per sequence of its pack."""
    arguments = {**dict(zip(model._thd_parameters, args, strict=False)), **kwargs}
    base = model.base_model
    if base is model or pack.ranks > 1 or shapes_are_static() or 0 in pack.lengths:
        raise ValueError(
            f"{type(model).__name__} computes one row per sequence, which needs a base model and whole, "
            "not empty sequences. Train it without context parallelism, CUDA graphs and empty sequences."
        )

    labels = arguments.pop("labels", None)
    as_tuple = arguments.pop("return_dict", None) is False
    outputs: list[Any] = []
    with base.register_forward_hook(lambda _, __, output: outputs.append(output)):
        output = forward(**arguments)

    logits = output.logits
    lengths = pack.real_token_lengths
    padded_lengths = pack.token_lengths
    padding_id = _padding_id(model)
    ids = arguments.get("input_ids")
    if ids is None:  # the model got embeddings, so any id but padding will do
        ids = torch.full((1, pack.slots), padding_id + 1, device=logits.device)

    # The head runs again on padded rows of its base model's output, so that it picks each sequence's token.
    rows = torch.empty(len(padded_lengths), logits.shape[-1], dtype=logits.dtype, device=logits.device)
    for members, places in uploaded(list(padded_rows(lengths, padded_lengths)), logits.device):
        source = pack.slots_of(places)
        real = source < pack.slots
        token_rows = torch.where(real, ids[0][source.clamp(max=pack.slots - 1)], padding_id)
        with _base_returns(model, _padded_output(base, outputs[0], source, pack)):
            part = forward(input_ids=token_rows, attention_mask=real.long()).logits
        rows = rows.index_copy(0, members, part.to(rows.dtype))

    loss = None if labels is None else _loss(model, rows, labels)
    output = type(output)(**{**output, "loss": loss, "logits": rows})  # output.loss = ... would put it last
    return output.to_tuple() if as_tuple else output


def _padding_id(model: Any) -> int:
    """Return the id of padding in a model's config; -1, which is no token, without one."""
    pad = model.config.get_text_config().pad_token_id
    return -1 if pad is None else int(pad)


@contextmanager
def _base_returns(model: Any, output: Any) -> Generator[None]:
    """Make the base model return ``output``, and the head expect ``_padding_id``, inside this context."""
    scope = current_scope()
    base = model.base_model
    text = model.config.get_text_config()
    assert scope is not None
    pad = text.pad_token_id
    text.pad_token_id = _padding_id(model)
    base.__dict__["forward"] = lambda *_, **__: output

    try:
        with scoped(Scope(None, scope.outer, module=model, families=scope.families)):
            yield
    finally:
        del base.__dict__["forward"]
        text.pad_token_id = pad


def _padded_output(base: Any, output: Any, source: Tensor, pack: Boundaries) -> Any:
    """Return the base model's output of a pack as padded rows; ``source`` gives each place its slot."""

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:2] != (1, pack.slots):
            return None
        return torch.cat([value[0], value.new_zeros(1, *value.shape[2:])])[source]

    padded = type(output)(**{name: rows(value) for name, value in output.items()})
    if getattr(base, "pooler", None) is not None and hasattr(padded, "pooler_output"):
        padded.pooler_output = _run_pooler(base, padded.last_hidden_state)
    return padded


def _loss(model: Any, rows: Tensor, labels: Tensor) -> Tensor:
    """Compute transformers' classification loss; ``labels`` are those of the pack's first sequences."""
    from transformers.loss.loss_utils import ForSequenceClassificationLoss

    if labels.shape[0] > rows.shape[0]:
        raise ValueError(
            f"{type(model).__name__} got {labels.shape[0]} labels for a pack of {rows.shape[0]} sequences. "
            "Pass at most one per sequence."
        )

    if not labels.shape[0]:  # an empty microbatch: the mean over no labels would be NaN
        return rows.sum() * 0.0

    loss: Tensor = ForSequenceClassificationLoss(labels, rows[: labels.shape[0]], model.config)
    return loss
