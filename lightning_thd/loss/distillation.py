"""Hidden states and heads of a student and a teacher -> the divergence of their predictions, without logits.

T slots, H hidden size, H' the teacher's, V vocabulary. The divergence takes 8THV operations if H' = H: 2THV
for each model's logits and 4THV for the student's gradients, which the forward pass computes already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._checks import choice, real_number
from lightning_thd.flops.listen import projecting
from lightning_thd.loss.arguments import CheckedRows, LossArgs, is_dtensor, local_hidden, plain
from lightning_thd.loss.linear_nll import check_weighted, linear_nll, scalar_loss
from lightning_thd.loss.tiles.divergence import Divergence, Kind, divergence_and_gradients
from lightning_thd.loss.tiles.logits import Head, HeadGradients, LogitMap, Needs
from lightning_thd.loss.tiles.nll import Penalties


def fused_linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    kind: Kind = "kl",
    temperature: float = 1.0,
    alpha: float = 1.0,
    beta: float = 0.5,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    valid_vocab_size: int | None = None,
    token_weights: Tensor | float | None = None,
    reduction: Literal["sum", "mean"] = "sum",
    tp_group: dist.ProcessGroup | None = None,
    chunk: int | Literal["auto"] = "auto",
    loss_tokens: int | None = None,
) -> Tensor:
    """Sum ``alpha * divergence + (1 - alpha) * cross entropy`` over the tokens, without storing logits.

    ``p`` is the teacher's and ``q`` the student's softmax of the logits divided by the temperature. "kl" is
    ``sum p log(p / q)``, arXiv:1503.02531; "reverse_kl" is ``sum q log(q / p)``, MiniLLM, arXiv:2306.08543;
    "jsd" is the generalised Jensen-Shannon divergence ``beta KL(p, m) + (1 - beta) KL(q, m)``,
    ``m = beta p + (1 - beta) q``, GKD, arXiv:2306.13649, equation 1. There is no factor of the squared
    temperature. The cross entropy uses temperature 1.

    All other arguments mean the same as in ``fused_linear_cross_entropy``, with the student's head. With
    ``alpha=1``, ``targets`` only say which tokens count. Under ``tp_group`` each tile of tokens (``chunk``)
    takes one or two small collectives.

    - ``teacher_hidden`` ``[T, H']`` (H' and float dtype may differ from the student's), ``teacher_weight``
      ``[V, H']``, sharded like ``weight``, and ``teacher_bias`` ``[V]``: none of them gets a gradient.
    - ``teacher_softcap``, ``teacher_logit_scale``: cap on the teacher's logits, and their factor before the
      cap.
    - ``alpha``: the divergence's share, 0 to 1; ``beta``: the teacher's share of m, above 0 and below 1.
    - ``temperature``: divides the logits of both models, after their caps.
    - ``valid_vocab_size``: the number of columns that exist in both vocabularies.

    Returns:
        fp32 ``[]`` (fp64 for fp64 inputs). With ``alpha=1``, a teacher equal to the student gives 0.
    """
    choice(kind, "kind", *get_args(Kind))
    choice(reduction, "reduction", "sum", "mean")
    if real_number(alpha, "alpha", least=0.0) > 1.0 or real_number(beta, "beta", above=0.0) >= 1.0:
        raise ValueError(
            f"alpha is {alpha} and beta {beta}, wanted alpha from 0 to 1 and beta above 0 and below 1. "
            "Instead of beta 0 use kind='kl', instead of beta 1 kind='reverse_kl'."
        )

    student_map = LogitMap(logit_scale, softcap, temperature, valid_vocab_size)
    student = LossArgs(hidden, weight, targets, bias, student_map, ignore_index, tp_group, chunk, loss_tokens)
    if is_dtensor(teacher_hidden):
        teacher_hidden = local_hidden(teacher_hidden, None)[0]

    teacher = replace(
        student,
        hidden=teacher_hidden.detach(),
        weight=plain(teacher_weight).detach(),
        bias=None if teacher_bias is None else plain(teacher_bias).detach(),
        logit_map=replace(student_map, scale=teacher_logit_scale, softcap=teacher_softcap),
        targets=plain(targets),
    )
    divergence = Divergence(kind=kind, beta=beta)
    mean = reduction == "mean"
    loss: Tensor = _distillation(student, teacher, divergence, alpha, token_weights, mean)
    return loss


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _distillation(
    student: LossArgs,
    teacher: LossArgs,
    divergence: Divergence,
    alpha: float,
    token_weights: Tensor | float | None,
    mean: bool,
) -> Tensor:
    with projecting((student.hidden, student.weight), (teacher.hidden, teacher.weight)):
        return _divergence_loss(student, teacher, divergence, alpha, token_weights, mean)


def _divergence_loss(
    student: LossArgs,
    teacher: LossArgs,
    divergence: Divergence,
    alpha: float,
    token_weights: Tensor | float | None,
    mean: bool,
) -> Tensor:
    checked, weights = check_weighted(student, token_weights, mean=mean)
    weights = weights * alpha
    hard: Tensor | None = None
    if alpha < 1.0:
        untempered = replace(student, logit_map=replace(student.logit_map, temperature=1.0))
        hard = linear_nll(untempered, Penalties(), token_weights=token_weights, mean=mean)
        hard = hard * (1.0 - alpha)
        if alpha == 0.0:
            return hard

    teacher_for = _head_teacher(student, teacher, checked, token_weights)
    hidden, weight, bias = checked.operands
    settings = checked.settings
    if not torch.is_grad_enabled():  # autograd would still ask the forward pass for gradients
        hidden = hidden.detach()
        weight = weight.detach()
        if bias is not None:
            bias = bias.detach()

    if settings.compute == torch.float16:  # no loss scale keeps these gradients above 0
        hidden = hidden.float()
        weight = weight.float()
        if bias is not None:
            bias = bias.float()
        settings = replace(settings, compute=torch.float32)

    def job(head: Head, targets: Tensor, weights: Tensor, needs: Needs) -> tuple[Tensor, HeadGradients]:
        return divergence_and_gradients(head, teacher_for(head), targets, weights, divergence, needs=needs)

    soft = scalar_loss(
        hidden, weight, bias, checked.targets, weights, settings, job, "fused_linear_distillation"
    )
    return soft if hard is None else soft + hard


def _head_teacher(
    student: LossArgs, teacher: LossArgs, checked: CheckedRows, token_weights: Tensor | float | None
) -> Callable[[Head], Head]:
    """Check a teacher's head, and return a function that cuts it into the tiles of a student's ``Head``."""
    settings = checked.settings
    teacher = replace(teacher, tp_group=settings.tp_group)
    of_teacher, _ = check_weighted(teacher, token_weights, mean=False)

    vocabulary = checked.operands[1].shape[0]
    teacher_vocabulary = of_teacher.operands[1].shape[0]
    if student.logit_map.valid_vocab_size is not None and settings.tp_group is None:
        columns_fit = teacher_vocabulary >= settings.columns  # what is beyond them is padding
    else:
        columns_fit = teacher_vocabulary == vocabulary
    if not columns_fit or teacher.hidden.shape[:-1] != student.hidden.shape[:-1]:
        raise ValueError(
            f"teacher_hidden is {list(teacher.hidden.shape)} and teacher_weight has {teacher_vocabulary} "
            f"rows, but hidden is {list(student.hidden.shape)} and weight has {vocabulary} rows, wanted the "
            "same tokens and V. Vocabularies that are padded differently need valid_vocab_size."
        )

    matched = replace(of_teacher.settings, columns=settings.columns, start=settings.start)
    return lambda head: Head(of_teacher.operands, of_teacher.targets, matched, head.tile)
