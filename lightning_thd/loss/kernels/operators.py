"""The kernels of ``rows`` as operators of torch, and the buffer of raw products that they read and overwrite.

As operators they are seen by whatever watches torch's operators: counters, fake tensors and recordings of a
step. Triton is imported when the first of them runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Numbers to which the length of a row is rounded up, as ``rows.ALIGNED``.
_ALIGNED = 16


class RowBuffer:
    """A buffer for the raw products of a tile, fp32 ``[c, v]``, and for their gradient in the same memory."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        width = -(-columns // _ALIGNED) * _ALIGNED
        self._whole = torch.empty(rows, width, dtype=torch.float32, device=device)

    def products(self, rows: int, columns: int) -> Tensor:
        """Return the place of the raw products of a tile, ``[c, v]``."""
        return self._whole[:rows, :columns]

    def memory(self, rows: int) -> Tensor:
        """Return whole rows, with their padding: what the operators below take as ``z``."""
        return self._whole[:rows]

    def gradient(self, rows: int, columns: int, compute: torch.dtype) -> Tensor:
        """Return the gradient that an operator left in the place of the raw products, ``[c, v]``."""
        return _place(self._whole[:rows], compute)[:, :columns]


def _place(z: Tensor, compute: torch.dtype) -> Tensor:
    """Return where the gradient of rows goes: in fp32 in place, in bf16 in the second half of each row."""
    if compute == z.dtype:
        return z
    return z.view(compute)[:, z.shape[1] :]


@torch.library.custom_op("lightning_thd::nll_of_rows", mutates_args=("z", "losses"))
def nll_of_rows(
    z: Tensor,
    losses: Tensor,
    targets: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    compute: torch.dtype,
    columns: int,
    ignore: int,
    smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> None:
    """Write the weighted losses of rows ``[c]``, and over the raw products ``z`` their gradient."""
    from lightning_thd.loss.kernels import rows

    out = _place(z, compute)
    rows.nll(
        z,
        out,
        losses,
        targets,
        weights,
        bias,
        columns,
        ignore,
        smoothing,
        z_loss,
        scale,
        softcap,
        temperature,
    )


@torch.library.custom_op("lightning_thd::statistics_of_rows", mutates_args=("stats",))
def statistics_of_rows(
    z: Tensor,
    stats: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    columns: int,
    start: int,
    entropy: bool,
    total: bool,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> None:
    """Merge the columns of a tile, the first of which is ``start``, into the statistics ``[5, c]``."""
    from lightning_thd.loss.kernels import rows

    rows.statistics(z, stats, targets, bias, columns, start, entropy, total, scale, softcap, temperature)


@torch.library.custom_op("lightning_thd::gradient_of_rows", mutates_args=("z",))
def gradient_of_rows(
    z: Tensor,
    factors: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    compute: torch.dtype,
    columns: int,
    start: int,
    slope: bool,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> None:
    """Write the gradient of a tile over its raw products ``z``.

    ``factors`` ``[5, c]`` are the lse of each row, and direct, slope, target and flat of ``RowGradients``.
    """
    from lightning_thd.loss.kernels import rows

    out = _place(z, compute)
    rows.gradient(z, out, factors, targets, bias, columns, start, slope, scale, softcap, temperature)


@torch.library.custom_op("lightning_thd::divergence_terms_of_rows", mutates_args=("sums",))
def divergence_terms_of_rows(
    z: Tensor,
    taught: Tensor,
    sums: Tensor,
    factors: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    taught_bias: Tensor | None,
    columns: int,
    ignore: int,
    kind: str,
    beta: float,
    scale: float,
    softcap: float | None,
    taught_scale: float,
    taught_softcap: float | None,
    temperature: float,
) -> None:
    """Write each row's divergence, and the sums that its gradient needs, to ``sums`` ``[5, c]``.

    ``z`` and ``taught`` are raw products of student and teacher. ``factors`` ``[6, c]`` begin with the
    student's largest logit and the log of its ``sum e^(z - largest)``, and the same of the teacher. The sums
    are the divergence, ``sum e^s (g - pivot)``, the pivot, ``sum e^s``, and the largest s. The kind "kl"
    needs no such sums, see ``divergence_gradient_of_rows``.
    """
    from lightning_thd.loss.kernels import rows

    rows.divergence_terms(
        z,
        taught,
        sums,
        factors,
        targets,
        bias,
        taught_bias,
        columns,
        ignore,
        kind,
        beta,
        scale,
        softcap,
        taught_scale,
        taught_softcap,
        temperature,
    )


@torch.library.custom_op("lightning_thd::divergence_gradient_of_rows", mutates_args=("z", "losses"))
def divergence_gradient_of_rows(
    z: Tensor,
    taught: Tensor,
    losses: Tensor,
    factors: Tensor,
    targets: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    taught_bias: Tensor | None,
    compute: torch.dtype,
    columns: int,
    ignore: int,
    kind: str,
    beta: float,
    scale: float,
    softcap: float | None,
    taught_scale: float,
    taught_softcap: float | None,
    temperature: float,
) -> None:
    """Write the weighted gradient of the student's rows over its raw products ``z``.

    ``factors`` ``[6, c]`` begin as those of ``divergence_terms_of_rows``, and end with its
    ``sum e^s (g - pivot)`` and its pivot. ``losses`` ``[c]`` get each row's divergence if the kind is "kl".
    """
    from lightning_thd.loss.kernels import rows

    out = _place(z, compute)
    rows.divergence_gradient(
        z,
        taught,
        out,
        losses,
        factors,
        targets,
        weights,
        bias,
        taught_bias,
        columns,
        ignore,
        kind,
        beta,
        scale,
        softcap,
        taught_scale,
        taught_softcap,
        temperature,
    )


@nll_of_rows.register_fake
def _(*_: object) -> None: ...


@statistics_of_rows.register_fake
def _(*_: object) -> None: ...


@gradient_of_rows.register_fake
def _(*_: object) -> None: ...


@divergence_terms_of_rows.register_fake
def _(*_: object) -> None: ...


@divergence_gradient_of_rows.register_fake
def _(*_: object) -> None: ...
