"""The caller's tensors and settings -> errors that say what came, what was wanted and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._static import shapes_are_static

if TYPE_CHECKING:
    from lightning_thd.loss.prepare import Call

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_tensors(**tensors: object) -> None:
    """Check that every argument is a tensor.

    Raises:
        TypeError: naming the argument and its type.
    """
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, wanted a torch.Tensor.")


def check_call(call: Call) -> None:
    """Check the types of a fused loss's arguments.

    Raises:
        TypeError: naming the argument, what came and what was wanted.
    """
    check_tensors(hidden=call.hidden, weight=call.weight, targets=call.targets)
    optional = {"bias": call.bias, "rows": call.rows}
    check_tensors(**{name: value for name, value in optional.items() if value is not None})
    if call.low_rank is not None:
        if not isinstance(call.low_rank, tuple | list) or len(call.low_rank) != 2:
            raise TypeError(
                f"low_rank is a {type(call.low_rank).__name__}, wanted a pair of tensors, x [T, r] and "
                "weight [V, r]."
            )
        check_tensors(**{"low_rank[0]": call.low_rank[0], "low_rank[1]": call.low_rank[1]})
    if isinstance(call.ignore_index, bool) or not isinstance(call.ignore_index, int):
        raise TypeError(f"ignore_index is {call.ignore_index!r}, wanted an int.")
    if not isinstance(call.sequence_parallel, bool):
        raise TypeError(f"sequence_parallel is {call.sequence_parallel!r}, wanted True or False.")
    if call.tp_group is not None and not isinstance(call.tp_group, dist.ProcessGroup):
        raise TypeError(
            f"tp_group is a {type(call.tp_group).__name__}, wanted a torch.distributed.ProcessGroup; of a "
            "DeviceMesh pass mesh.get_group('tp')."
        )


def check_operands(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_rank: tuple[Tensor, Tensor] | None,
    *,
    autocast: bool,
) -> None:
    """Check shapes, dtypes and devices of hidden states, weight, bias and LoRA.

    Args:
        hidden: wanted ``[..., H]``.
        weight: wanted ``[V, H]``.
        bias: wanted ``[V]``.
        low_rank: wanted ``([..., r], [V, r])``.
        autocast: whether dtypes may differ, since all are cast anyway.

    Raises:
        ValueError: for shapes, dtypes or devices that do not fit.
    """
    if weight.ndim != 2 or hidden.ndim < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}, wanted [T, H] and [V, H] with "
            "one H. Pass the head's weight as nn.Linear stores it, one row a vocabulary entry."
        )
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{name} is {tensor.dtype}, wanted fp32, fp64, bf16 or fp16.")
    if hidden.dtype != weight.dtype and not autocast:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}, wanted one dtype. Cast one of them, or "
            "call under torch.autocast, which casts both."
        )
    _check_device("weight", weight, hidden)
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias is {list(bias.shape)}, wanted [{weight.shape[0]}], one a row of weight.")
        _check_device("bias", bias, hidden)
    if low_rank is not None:
        x, w = low_rank
        if x.shape[:-1] != hidden.shape[:-1] or w.shape != (weight.shape[0], x.shape[-1]):
            raise ValueError(
                f"low_rank is {list(x.shape)} and {list(w.shape)}, wanted {[*hidden.shape[:-1], 'r']} and "
                f"[{weight.shape[0]}, r] beside hidden {list(hidden.shape)}."
            )
        _check_device("low_rank", x, hidden)
        _check_device("low_rank", w, hidden)


def _check_device(name: str, tensor: Tensor, hidden: Tensor) -> None:
    if tensor.device != hidden.device:
        raise ValueError(
            f"{name} is on {tensor.device} and hidden on {hidden.device}, wanted one device. Move one: "
            f"{name}.to(hidden.device)."
        )


def check_targets(targets: Tensor, hidden: Tensor, shape: torch.Size) -> None:
    """Check that targets are integers of ``shape`` (sequence parallel: of all ranks' rows) on the device.

    Raises:
        ValueError: saying which of the three is off.
    """
    if targets.shape != shape:
        raise ValueError(
            f"targets is {list(targets.shape)} and hidden {list(hidden.shape)}, wanted one target a token: "
            f"{list(shape)}. Targets are already shifted: targets[i] is what token i should predict."
        )
    if targets.dtype.is_floating_point or targets.dtype in (torch.bool, torch.uint8):
        raise ValueError(f"targets is {targets.dtype}, wanted int64 indices into the vocabulary.")
    _check_device("targets", targets, hidden)


def check_target_values(targets: Tensor, ignore_index: int, vocabulary: int) -> None:
    """Check that targets are in the whole vocabulary; an error on the CPU, a device assert elsewhere.

    Raises:
        ValueError: naming the first offender.
    """
    if targets.is_meta:
        return
    wrong = ((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)
    if targets.device.type != "cpu":
        torch._assert_async(~wrong.any(), f"a target is outside the vocabulary of {vocabulary}")
        return
    if shapes_are_static():
        return
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(
            f"targets[{at}] is {int(targets[at])}, wanted 0 to {vocabulary - 1} or "
            f"ignore_index={ignore_index}. "
            "Tokenizer and model differ in vocabulary, or valid_vocab_size is too small."
        )


def check_top_tokens(tokens: Tensor, missing: Tensor, vocabulary: int) -> None:
    """Check a teacher's likeliest tokens ``[R, k]``; an error on the CPU, a device assert elsewhere.

    Raises:
        ValueError: for a token outside of the vocabulary, or twice in a row: its share would be lost.
    """
    if tokens.is_meta:
        return
    ordered = torch.where(missing, -1, tokens).sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    outside = ((tokens < 0) | (tokens >= vocabulary)) & ~missing
    if tokens.device.type != "cpu":
        said = f"teacher_topk has a token outside the vocabulary of {vocabulary}, or one twice"
        torch._assert_async(~(outside.any() | twice.any()), said)
    elif not shapes_are_static() and bool(outside.any() | twice.any()):
        row = int((outside.any(-1) | twice.any(-1)).nonzero()[0])
        raise ValueError(
            f"teacher_topk has the tokens {tokens[row].tolist()} for a token, wanted distinct ones from 0 to "
            f"{vocabulary - 1}: the share of others would be lost. Where a teacher gives fewer, fill up with "
            "log-probabilities of -inf."
        )


def check_rows(rows: Tensor, tokens: int, device: torch.device) -> Tensor:
    """Check the ``rows`` argument, int64 ``[R]`` or bool ``[T]``, and return it as indices.

    Raises:
        ValueError: for another dtype, shape or device, or an index out of range (on the CPU).
    """
    if rows.device != device:
        raise ValueError(f"rows is on {rows.device} and hidden on {device}, wanted one device. Move rows.")
    if rows.dtype == torch.bool:
        if rows.shape != (tokens,):
            raise ValueError(f"rows is bool {list(rows.shape)}, wanted [{tokens}], one entry a token.")
        return rows.nonzero().squeeze(1)
    if rows.ndim != 1 or rows.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"rows is {rows.dtype} {list(rows.shape)}, wanted int64 [R] or bool [{tokens}].")
    if rows.device.type == "cpu" and rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= tokens):
        raise ValueError(
            f"rows goes from {int(rows.min())} to {int(rows.max())}, wanted indices 0 to {tokens - 1}."
        )
    return rows.long()


def refuse_double_backward(name: str) -> None:
    """Refuse ``create_graph=True``, a backward pass that is itself recorded.

    Raises:
        RuntimeError: naming the function.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} was differentiated with create_graph=True, but it keeps no logits to differentiate "
            "twice. Use create_graph=False, or materialised logits for a second derivative."
        )
