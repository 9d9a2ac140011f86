"""Embeddings of queries and documents -> the InfoNCE loss, whose negatives are the step's other documents.

Legend: Q queries, N documents (positives and hard negatives), P pairs of a query and one of its positives,
D embedding size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lightning_thd._checks import described, flags, host_ints, instance, real_number
from lightning_thd.batch.upload import uploaded

__all__ = ["pair_losses"]

Pairs = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Similarity:
    """How the loss compares embeddings; ``pair_losses`` documents the attributes."""

    temperature: float = 0.05
    symmetric: bool = False
    normalize: bool = True
    dims: Sequence[int] | None = None
    dim_weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        advice = "0.05 is 1 / scale of sentence-transformers."
        real_number(self.temperature, "temperature", above=0, advice=advice)
        flags(symmetric=self.symmetric, normalize=self.normalize)
        if self.dims is None:
            if self.dim_weights is not None:
                raise ValueError("dim_weights= was given without dims=. Pass dims=, such as (256, 64), too.")
            return
        dims = host_ints(self.dims, "dims", least=1, advice="Pass sizes of embeddings, such as (256, 64).")
        object.__setattr__(self, "dims", tuple(dims.tolist()))
        if not len(dims) or len(set(dims.tolist())) < len(dims):
            raise ValueError(f"dims={self.dims}; wanted one or more different sizes. Pass (256, 64), say.")
        weights = (1.0,) * len(dims) if self.dim_weights is None else tuple(self.dim_weights)
        if len(weights) != len(dims):
            raise ValueError(f"There are {len(weights)} dim_weights but {len(dims)} dims. Give one each.")
        for i, weight in enumerate(weights):
            real_number(weight, f"dim_weights[{i}]", least=0, advice="It multiplies the loss of dims[i].")
        object.__setattr__(self, "dim_weights", weights)

    def sizes(self, size: int) -> list[tuple[int, float]]:
        """Return the sizes to which embeddings of ``size`` numbers are cut, each with its weight."""
        if self.dims is None or self.dim_weights is None:
            return [(size, 1.0)]
        if max(self.dims) > size:
            raise ValueError(
                f"dims={self.dims}, but the embeddings have {size} numbers. Leave out the larger sizes."
            )
        return list(zip(self.dims, self.dim_weights, strict=True))


def pair_losses(
    queries: Tensor,
    documents: Tensor,
    pairs: Any = None,
    *,
    temperature: float = 0.05,
    symmetric: bool = False,
    normalize: bool = True,
    dims: Sequence[int] | None = None,
    dim_weights: Sequence[float] | None = None,
) -> Tensor:
    """Compute the InfoNCE loss of every pair of a query and its positive document.

    The loss is ``-log(exp(s(q, p) / t) / sum exp(s(q, d) / t))`` (arXiv:1807.03748, equation 4). The sum runs
    over the positive and all documents that are no positive of the query: other positives of the same query
    are left out. The mean over pairs is ``MultipleNegativesRankingLoss`` of sentence-transformers with
    ``scale = 1 / temperature``, if each query has one positive.

    Args:
        queries: floats ``[Q, D]``.
        documents: floats ``[N, D]``, positives and negatives.
        pairs: ints ``[P, 2]``, the rows of a query and of one of its positives. By default, document i is the
            positive of query i, and documents from Q on are negatives.
        temperature: divides the similarities; above 0.
        symmetric: average with the loss that finds the query of a document among all queries.
        normalize: compare directions, by cosine; else by the dot product.
        dims: sizes to which embeddings are cut, each for a loss of its own, so that their first numbers are
            embeddings too (Matryoshka, arXiv:2205.13147). None compares whole embeddings.
        dim_weights: factors of these losses, which are added; 1 by default.

    Returns:
        ``[P]``, in fp32 or fp64. With temperature 1, queries ``[[1, 0], [0, 1]]`` and the same documents give
        ``[log(1 + 1 / e)] * 2``, which is ``[0.313, 0.313]``.

    Raises:
        ValueError: for embeddings that do not fit each other, or pairs that name other rows.
    """
    similarity = Similarity(
        temperature=temperature,
        symmetric=symmetric,
        normalize=normalize,
        dims=dims,
        dim_weights=dim_weights,
    )
    for name, rows in (("queries", queries), ("documents", documents)):
        instance(rows, name, Tensor, advice="Pass one embedding per row.")
        if rows.ndim != 2 or not rows.is_floating_point():
            raise ValueError(f"{name} is {described(rows)}; wanted floats [rows, D]. Pass embeddings.")
    if queries.shape[1] != documents.shape[1]:
        raise ValueError(
            f"queries have {queries.shape[1]} numbers a row but documents have {documents.shape[1]}. Embed "
            "both by one model, or by two models of the same size."
        )
    return losses_of_pairs(queries, documents, _checked_pairs(pairs, queries, documents), similarity)


def _checked_pairs(pairs: Any, queries: Tensor, documents: Tensor) -> Pairs:
    if pairs is None:
        if len(documents) < len(queries):
            raise ValueError(
                f"There are {len(queries)} queries but {len(documents)} documents, and no pairs. Give one "
                "document per query, in the order of the queries, or pass pairs=."
            )
        rows = np.arange(len(queries))
        return np.stack([rows, rows], 1)
    found = host_ints(pairs, "pairs", ndim=2, advice="Pass [[row of query, row of positive], ...].")
    if found.shape[1] != 2:
        raise ValueError(f"pairs has shape {found.shape}; wanted [P, 2]. Pass [[query, positive], ...].")
    most = np.array([len(queries), len(documents)])
    wrong = ((found < 0) | (found >= most)).any(1)
    if wrong.any():
        raise ValueError(
            f"The pair {found[wrong][0].tolist()} names a row outside of {len(queries)} queries and "
            f"{len(documents)} documents. Rows count from 0."
        )
    return found


def losses_of_pairs(queries: Tensor, documents: Tensor, pairs: Pairs, similarity: Similarity) -> Tensor:
    """Compute ``pair_losses`` of checked arguments."""
    device = queries.device
    wide = torch.promote_types(torch.promote_types(queries.dtype, documents.dtype), torch.float32)
    rows, columns = uploaded(pairs[:, 0].copy(), device), uploaded(pairs[:, 1].copy(), device)
    other_positives = _others(pairs[:, 0], pairs[:, 1])
    other_queries = _others(pairs[:, 1], pairs[:, 0])
    total = torch.zeros(len(pairs), dtype=wide, device=device)
    with torch.autocast(device.type, enabled=False):
        for size, weight in similarity.sizes(queries.shape[1]):
            q, d = (part[:, :size].to(wide) for part in (queries, documents))
            if similarity.normalize:
                q, d = F.normalize(q, dim=-1), F.normalize(d, dim=-1)
            temperature = similarity.temperature
            loss = _of_one_direction(q.index_select(0, rows), d, columns, other_positives, temperature)
            if similarity.symmetric:
                back = _of_one_direction(d.index_select(0, columns), q, rows, other_queries, temperature)
                loss = (loss + back) / 2
            total = total + weight * loss
    return total


def _of_one_direction(
    rows: Tensor, candidates: Tensor, positive: Tensor, others: Pairs | None, temperature: float
) -> Tensor:
    """Return the loss ``[P]`` of finding the candidate ``positive`` of each row, without ``others``."""
    logits = rows @ candidates.T / temperature
    if others is not None:
        hidden = uploaded(others, logits.device)
        logits = logits.index_put((hidden[0], hidden[1]), logits.new_tensor(-torch.inf))
    return F.cross_entropy(logits, positive, reduction="none")


def _others(owners: NDArray[np.int64], members: NDArray[np.int64]) -> Pairs | None:
    """Return the entries ``[2, E]`` (pair, member) of members that other pairs of the same owner have.

    Owners ``[0, 0, 1]`` and members ``[3, 4, 5]`` give ``[[0, 1], [4, 3]]``; None if no owner has several.
    """
    order = np.argsort(owners, kind="stable")
    ranked = owners[order]
    entries: list[NDArray[np.int64]] = []
    for distance in range(1, len(owners)):
        same = np.flatnonzero(ranked[distance:] == ranked[:-distance])
        if not len(same):
            break
        first, second = order[same], order[same + distance]
        entries += [np.stack([first, members[second]]), np.stack([second, members[first]])]
    return np.concatenate(entries, axis=1) if entries else None
