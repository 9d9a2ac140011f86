"""Arguments of a fused loss -> checked and selected rows; results of rows -> the shape of the targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._checks import shaped, whole_number
from lightning_thd._static import RUN
from lightning_thd.batch.upload import version
from lightning_thd.loss.tiles.logits import LogitMap, Operands, Settings
from lightning_thd.loss.tiles.products import has_autocast, is_native

# Shapes: T slots, R rows (selected slots, of which some may not count), H hidden size, V vocabulary.
_FLOATS = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
# If a smaller share of rows is ignored, computing these rows costs less than copying all others.
_WORTH_SKIPPING = 0.05
# Types of arguments that are no DTensors.
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
# Reading a number from these devices makes Python wait, so ``LossArgs.loss_tokens``, if known, is used.
_WAITS = {"cuda"}


@dataclass(frozen=True, slots=True)
class LossArgs:
    """The arguments of ``fused_linear_logprobs``; without ``weight``, ``hidden`` are logits ``[..., V]``."""

    hidden: Tensor
    weight: Tensor | None
    targets: Tensor
    bias: Tensor | None = None
    logit_map: LogitMap = LogitMap()  # noqa: RUF009 (frozen)
    ignore_index: int = -100
    tp_group: dist.ProcessGroup | None = None
    chunk: int | Literal["auto"] = "auto"
    loss_tokens: int | None = None
    rows: Tensor | None = None
    partial_hidden: bool = False  # whether DTensor, not the loss, sums the gradient of ``hidden``


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRows:
    """Checked operands and targets of the R rows."""

    operands: Operands  # hidden ``[R, H]``, weight and bias, which autograd follows
    targets: Tensor  # int64 ``[R]``
    counts: Tensor | None  # bool ``[R]``, False for ignored targets; None if all count
    kept: Tensor | None  # int64 ``[R]``, indices of the rows in the flattened ``shape``; None for all
    shape: torch.Size  # the shape of the results
    settings: Settings  # dtypes, tile size, vocabulary and group

    def restore(self, values: Tensor) -> Tensor:
        """Scatter results ``[R, ...]`` to ``shape``, with zeros for ignored targets."""
        rest = values.shape[1:]
        if self.counts is not None:
            counts = self.counts.view(-1, *[1] * len(rest))
            values = torch.where(counts, values, values.new_zeros(()))
        if self.kept is not None:  # index_add, because ``kept`` may repeat an index, with zeros in ``values``
            values = values.new_zeros(self.shape.numel(), *rest).index_add(0, self.kept, values)
        return values.view(*self.shape, *rest)


def check_rows(args: LossArgs) -> CheckedRows:
    """Check the arguments of a fused loss, flatten them and select the rows to multiply."""
    if not {type(argument) for argument in (args.hidden, args.weight, args.bias, args.targets)} <= _PLAIN:
        args = _local(args)

    hidden = args.hidden
    weight = args.weight
    group = args.tp_group
    autocast = has_autocast(hidden.device)
    if weight is None:  # ``hidden`` are logits
        columns_of_rank = hidden.shape[-1]
        weight = hidden.new_empty(0)
    else:
        check_operands(hidden, weight, args.bias, autocast=autocast)
        columns_of_rank = weight.shape[0]

    _check_targets(args.targets, hidden)
    if type(args.ignore_index) is not int:
        whole_number(args.ignore_index, "ignore_index", least=None)
    if args.chunk != "auto":
        whole_number(args.chunk, "chunk", least=1, advice='Pass the tokens of a tile, or "auto".')

    ranks = 1
    start = 0
    if group is not None:
        ranks = dist.get_world_size(group)
        start = dist.get_rank(group) * columns_of_rank

    valid_vocab_size = args.logit_map.valid_vocab_size
    vocabulary = columns_of_rank * ranks if valid_vocab_size is None else valid_vocab_size
    if vocabulary > columns_of_rank * ranks:
        raise ValueError(
            f"valid_vocab_size is {vocabulary} but weight has {columns_of_rank * ranks} rows over {ranks} "
            "rank(s), wanted at most that many."
        )

    accumulator = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
    compute = hidden.dtype
    if autocast:  # autocast does not cast fp64
        is_fp64 = accumulator == torch.float64
        compute = accumulator if is_fp64 else torch.get_autocast_dtype(hidden.device.type)

    hidden = hidden.flatten(0, -2)
    targets = args.targets.flatten().long()
    shape = args.targets.shape
    kept: Tensor | None = None
    counts: Tensor | None
    if args.rows is None:
        at_most = None
        if hidden.device.type in _WAITS and version(args.targets) <= 0:  # nobody changed the targets in place
            at_most = args.loss_tokens

        kept, targets, counts = rows_with_target(targets, args.ignore_index, at_most=at_most)
        if kept is not None:
            hidden = hidden.index_select(0, kept)
    else:
        chosen = _check_rows(args.rows, hidden)
        hidden = hidden.index_select(0, chosen)
        targets = targets[chosen]
        shape = chosen.shape
        counts = targets != args.ignore_index

    _check_target_values(targets, counts, args.ignore_index, vocabulary)
    return CheckedRows(
        operands=(hidden, weight, args.bias),
        targets=targets,
        counts=counts,
        kept=kept,
        shape=shape,
        settings=Settings(
            logit_map=args.logit_map,
            vocabulary=vocabulary,
            columns=max(0, min(columns_of_rank, vocabulary - start)),  # without padding
            start=start,
            compute=compute,
            accumulator=accumulator,
            native=is_native(compute, hidden.device),
            chunk=args.chunk,
            tp_group=group,
            partial_hidden=args.partial_hidden,
            ignore_index=None if counts is None else args.ignore_index,
            of_logits=args.weight is None,
        ),
    )


def _local(args: LossArgs) -> LossArgs:
    """Return the arguments with this rank's parts of DTensors, and the group that shares the vocabulary."""
    hidden = args.hidden
    group = args.tp_group
    partial_hidden = args.partial_hidden
    if is_dtensor(args.weight):
        group = group_of_operands(hidden, args.weight, group)
    if is_dtensor(hidden):
        hidden, partial_hidden = local_hidden(hidden, group)

    return replace(
        args,
        hidden=hidden,
        weight=plain(args.weight),
        bias=None if args.bias is None else plain(args.bias),
        targets=plain(args.targets),
        tp_group=group,
        partial_hidden=partial_hidden,
    )


def rows_with_target(
    targets: Tensor, ignore_index: int, *, at_most: int | None = None
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return the rows to compute, their targets, and which of them count; None means all.

    With ``at_most``, nothing is read from the device, and ignored rows fill up the ``at_most`` rows.
    """
    counts = targets != ignore_index
    capturing = targets.is_cuda and torch.cuda.is_current_stream_capturing()
    if getattr(RUN, "static", False) or targets.is_meta or capturing:
        return None, targets, counts

    total = targets.numel()
    if at_most is None:
        num_rows = int(counts.sum())
        if num_rows == total:
            return None, targets, None
    else:
        num_rows = min(at_most, total)

    if num_rows > (1.0 - _WORTH_SKIPPING) * total:
        return None, targets, counts
    if at_most is None:
        rows = counts.nonzero().squeeze(1)
        return rows, targets[rows], None

    number = counts.sum()
    message = f"more targets count than the {num_rows} that loss_tokens allows"
    torch.ops.aten._assert_async.msg(number <= num_rows, message)
    # nonzero_static takes the number of results from the host; the rows after ``number`` repeat row 0.
    rows = counts.nonzero_static(size=num_rows, fill_value=0).squeeze(1)
    has_target = torch.arange(num_rows, device=targets.device) < number
    return rows, torch.where(has_target, targets[rows], ignore_index), has_target


def check_operands(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, autocast: bool) -> None:
    """Check shapes, dtypes and devices of hidden ``[..., H]``, weight ``[V, H]`` and bias ``[V]``."""
    if weight.ndim != 2 or hidden.ndim < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}, wanted [T, H] and [V, H] with "
            "the same H. nn.Linear stores its weight as [V, H]."
        )

    dtypes = {hidden.dtype, weight.dtype}
    if not dtypes <= _FLOATS or (len(dtypes) > 1 and not autocast):
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}, wanted one dtype of fp32, fp64, bf16 and "
            "fp16. Cast one of them, or call under torch.autocast, which casts both."
        )

    if bias is not None:
        shaped(bias, "bias", weight.shape[:1], "one per row of weight.")

    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise _other_device(name, tensor, hidden)


def _other_device(name: str, tensor: Tensor, hidden: Tensor) -> ValueError:
    return ValueError(
        f"{name} is on {tensor.device} and hidden on {hidden.device}, wanted one device. Move one."
    )


def _check_targets(targets: Tensor, hidden: Tensor) -> None:
    if targets.shape != hidden.shape[:-1]:
        what = "already shifted: targets[i] is the token that token i predicts."
        shaped(targets, "targets", hidden.shape[:-1], what)
    if targets.dtype.is_floating_point or targets.dtype in (torch.bool, torch.uint8):
        raise ValueError(f"targets is {targets.dtype}, wanted int64 indices into the vocabulary.")
    if targets.device != hidden.device:
        raise _other_device("targets", targets, hidden)


def _check_target_values(targets: Tensor, counts: Tensor | None, ignore_index: int, vocabulary: int) -> None:
    """Refuse targets outside the vocabulary: on a CPU, unless shapes are static; elsewhere by an assert."""
    if targets.is_meta:
        return

    valid = targets == targets.clamp(0, vocabulary - 1)
    if counts is not None:
        valid = valid >= counts  # True >= False: what does not count may have any value

    if targets.device.type != "cpu":
        torch.ops.aten._assert_async.msg(valid.all(), f"a target is outside the vocabulary of {vocabulary}")
    elif not getattr(RUN, "static", False) and not bool(valid.all()):
        index = int((~valid).nonzero()[0])
        raise ValueError(
            f"targets[{index}] is {int(targets[index])}, wanted 0 to {vocabulary - 1} or {ignore_index=}. "
            "Tokenizer and model differ in vocabulary, or valid_vocab_size is too small."
        )


def _check_rows(rows: Tensor, hidden: Tensor) -> Tensor:
    """Return the indices of the rows to compute, int64 ``[R]``, from indices or a mask."""
    if rows.device != hidden.device:
        raise _other_device("rows", rows, hidden)
    tokens = hidden.shape[0]
    mask = rows.dtype == torch.bool
    if rows.ndim != 1 or (mask and len(rows) != tokens) or rows.is_floating_point():
        raise ValueError(f"rows is {rows.dtype} {list(rows.shape)}, wanted int64 [R] or bool [{tokens}].")
    if mask:
        return rows.nonzero().squeeze(1)
    if rows.device.type == "cpu" and rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= tokens):
        raise ValueError(
            f"rows goes from {int(rows.min())} to {int(rows.max())}, wanted indices 0 to {tokens - 1}."
        )
    return rows.long()


def refuse_double_grad(name: str) -> None:
    """Refuse ``create_graph=True``, a backward pass that is itself recorded."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} was differentiated with create_graph=True, but it keeps no logits for a second "
            "derivative. Use create_graph=False, or materialised logits."
        )


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, without importing the distributed package."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def plain(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor; a plain tensor unchanged."""
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local


def vocabulary_group(weight: Any) -> dist.ProcessGroup | None:
    """Return the group over which rows of the weight are sharded; None if every rank has all of them."""
    sharded = [(axis, p) for axis, p in enumerate(weight.placements) if not p.is_replicate()]
    if not sharded:
        return None

    axis, placement = sharded[0]
    if len(sharded) > 1 or not placement.is_shard(0):
        raise ValueError(
            f"The head's weight is placed as {tuple(weight.placements)}, wanted rows of the vocabulary over "
            "one mesh axis (Shard(0)) or replicated. Under FSDP2 call the module that gathers the weight."
        )

    group: dist.ProcessGroup = weight.device_mesh.get_group(axis)
    return group


def local_hidden(hidden: Any, group: dist.ProcessGroup | None) -> tuple[Tensor, bool]:
    """Gather distributed hidden states; also return whether their gradient is a partial sum over ranks."""
    from torch.distributed.tensor import Partial, Replicate

    if any(not placement.is_replicate() for placement in hidden.placements):
        hidden = hidden.redistribute(placements=[Replicate()] * len(hidden.placements))
    if group is None or len(hidden.placements) != 1:
        return hidden.to_local(), False
    # The gradient stays a partial sum: DTensor reduces it, or reduce-scatters it under sequence parallel.
    return hidden.to_local(grad_placements=[Partial()]), True


def group_of_operands(
    hidden: Tensor, weight: Any, group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return the tensor-parallel group of a distributed weight; a given ``group`` must equal it."""
    placed = vocabulary_group(weight)
    if group is not None:
        if placed is None or dist.get_process_group_ranks(placed) != dist.get_process_group_ranks(group):
            raise ValueError(
                f"weight is a DTensor placed as {tuple(weight.placements)} and tp_group another group, "
                "wanted the group its rows are sharded over. Leave tp_group out, or pass weight.to_local()."
            )
        return group

    names = weight.device_mesh.mesh_dim_names or ()
    cut_axes = [name for name, p in zip(names, weight.placements, strict=False) if not p.is_replicate()]
    # Ranks of an axis with such a name hold the same tokens; those of FSDP2 do not.
    if is_dtensor(hidden) or any("tp" in name or "tensor" in name for name in cut_axes[:1]):
        return placed

    raise ValueError(
        f"weight is a DTensor placed as {tuple(weight.placements)} on {weight.device_mesh} and hidden a "
        "plain tensor, so it is unknown whether the ranks hold the same tokens. If they do, pass "
        "tp_group=weight.device_mesh.get_group(); if not, call this inside the module of fully_shard."
    )
