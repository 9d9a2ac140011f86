"""A pack of queries and documents -> the InfoNCE loss, whose negatives are the step's other documents.

Legend: S sequences of a pack, Q queries, N documents (positives and hard negatives), P pairs of a query and
one of its positives, D embedding size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_thd._checks import choice, described, flags, host_ints, instance, real_number
from lightning_thd._find import models_in, text_config
from lightning_thd._static import trial_runs
from lightning_thd.batch import THDBatch
from lightning_thd.batch.examples import Places, places_of
from lightning_thd.batch.noted import note_mean_of_sequences, unnoted
from lightning_thd.batch.thd_batch import check_batch
from lightning_thd.batch.upload import uploaded
from lightning_thd.loss.tiles.products import has_autocast
from lightning_thd.models.preparing import is_prepared, prepare
from lightning_thd.parallel.across_ranks import communication_device, gather_ints, group_size
from lightning_thd.parallel.exchange import all_gather_rows
from lightning_thd.parallel.mesh import TENSOR

__all__ = ["embed", "info_nce", "pair_losses"]

Pooling = Literal["last", "mean", "first"]
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

    return _losses_of_pairs(queries, documents, _checked_pairs(pairs, queries, documents), similarity)


def _checked_pairs(pairs: Any, queries: Tensor, documents: Tensor) -> Pairs:
    """Return ``pairs`` as an array; raise if one names a row that is not there, or is there twice."""
    if pairs is None:
        if len(documents) < len(queries):
            raise ValueError(
                f"There are {len(queries)} queries but {len(documents)} documents, and no pairs. Give one "
                "document per query, in the order of the queries, or pass pairs=."
            )
        rows = np.arange(len(queries))
        return np.stack([rows, rows], 1)

    checked = host_ints(pairs, "pairs", ndim=2, advice="Pass [[row of query, row of positive], ...].")
    if checked.shape[1] != 2:
        raise ValueError(f"pairs has shape {checked.shape}; wanted [P, 2]. Pass [[query, positive], ...].")

    most = np.array([len(queries), len(documents)])
    wrong = ((checked < 0) | (checked >= most)).any(1)
    if wrong.any():
        raise ValueError(
            f"The pair {checked[wrong][0].tolist()} names a row outside of {len(queries)} queries and "
            f"{len(documents)} documents. Rows count from 0."
        )

    different, times = np.unique(checked, axis=0, return_counts=True)
    if len(different) < len(checked):
        raise ValueError(f"The pair {different[times > 1][0].tolist()} is there twice. Give each pair once.")
    return checked


def _losses_of_pairs(queries: Tensor, documents: Tensor, pairs: Pairs, similarity: Similarity) -> Tensor:
    """Compute ``pair_losses`` of checked arguments."""
    device = queries.device
    wide = torch.promote_types(torch.promote_types(queries.dtype, documents.dtype), torch.float32)
    rows = uploaded(pairs[:, 0].copy(), device)
    columns = uploaded(pairs[:, 1].copy(), device)
    other_positives = _others(pairs[:, 0], pairs[:, 1])
    other_queries = _others(pairs[:, 1], pairs[:, 0])
    total = torch.zeros(len(pairs), dtype=wide, device=device)

    with torch.autocast(device.type, enabled=False):
        for size, weight in similarity.sizes(queries.shape[1]):
            q, d = (part[:, :size].to(wide) for part in (queries, documents))
            if similarity.normalize:
                q = F.normalize(q, dim=-1)
                d = F.normalize(d, dim=-1)
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
        first = order[same]
        second = order[same + distance]
        entries += [np.stack([first, members[second]]), np.stack([second, members[first]])]

    return np.concatenate(entries, axis=1) if entries else None


class _Encoder(NamedTuple):
    """How a batch becomes embeddings, and a key that names the way; None for a function without a name."""

    run: Callable[[THDBatch], Tensor]  # a batch -> ``[S, D]``
    key: tuple[Any, ...] | None


def embed(model: nn.Module, batch: THDBatch, *, pooling: Pooling = "last") -> Tensor:
    """Run a model on a pack and pool its hidden states to one embedding for every sequence.

    Args:
        model: an encoder or decoder without a head, as ``AutoModel.from_pretrained(...,
            attn_implementation="thd")`` builds it, bare or wrapped (DDP, FSDP2, PEFT).
        batch: the pack, on the model's device.
        pooling: take each sequence's "last" token, its "first" one, or the "mean" of all.

    Returns:
        ``[S, D]`` in the order of ``batch.sequence_ids``. They are not normalised.

    Raises:
        ValueError: for a model without hidden states or with another attention, and for a shard of a pack.
    """
    choice(pooling, "pooling", *get_args(Pooling))
    instance(model, "model", nn.Module, advice="Pass the model itself.")
    check_batch(batch)
    if batch.boundaries.ranks > 1:
        raise ValueError(
            f"{batch.boundaries.ranks} ranks share the pack, but sequences are pooled whole. Set "
            "context_parallel_size=1."
        )

    _require_thd(model)
    output = model(**batch.hf_kwargs())
    hidden = getattr(output, "last_hidden_state", None)
    if not isinstance(hidden, Tensor):
        raise ValueError(
            f"{type(model).__name__} returns no last_hidden_state, which would be pooled. Build the model by "
            "AutoModel, or pass the part without the head, such as model.model."
        )

    return batch.pool(hidden, pooling)


def _require_thd(model: nn.Module) -> None:
    """Raise ValueError if a model of transformers runs another attention; prepare one with "thd"."""
    for _, inner in models_in(model):
        attention = getattr(text_config(inner.config), "_attn_implementation", None)
        if attention != "thd":
            raise ValueError(
                f"{type(inner).__name__} runs attn_implementation={attention!r}, with which sequences of a "
                "pack can see each other. Build it with attn_implementation='thd'."
            )
        if not is_prepared(inner):
            prepare(model)
        return


def info_nce(
    model: nn.Module | Callable[[THDBatch], Tensor] | Tensor,
    batch: THDBatch,
    *,
    pooling: Pooling = "last",
    temperature: float = 0.05,
    symmetric: bool = False,
    normalize: bool = True,
    dims: Sequence[int] | None = None,
    dim_weights: Sequence[float] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute the InfoNCE loss of a batch of queries and documents, with all documents of the step.

    A query is compared with its positive and with the other documents of the step: of all microbatches and
    all ranks, hard negatives included. The loss of a query is the mean over its positives (``pair_losses``).
    The mean of this value over microbatches and ranks is the mean over the step's queries. It does not depend
    on the packing.

    A step of several microbatches runs each of them twice: the first call embeds all microbatches without
    gradients and computes the gradients of the embeddings (GradCache, arXiv:2101.06983). Each call then
    backpropagates its own part. The second pass repeats the random numbers of the first, such as dropout's.
    Without gradients, as in validation, the value is the mean over this rank's queries of the batch.

    Args:
        model: a model without a head, as for ``embed``; or a function from a batch to embeddings ``[S, D]``,
            which may return other values for each microbatch only by random numbers of torch; or the
            embeddings of the batch, if the step has one microbatch a rank.
        batch: the microbatch, whose ``roles`` tell queries, positives and negatives apart, as
            ``THDDataModule`` and ``THDBatch.collate`` make it of records with a query.
        pooling: "last", "mean" or "first" token, as for ``embed``; not used if ``model`` is no model.
        temperature: divides the similarities; above 0.
        symmetric: average with the loss that finds the query of each positive.
        normalize: compare by cosine; else by the dot product.
        dims: sizes to which embeddings are cut, as for ``pair_losses``.
        dim_weights: factors of the losses of ``dims``, which are added.
        group: the ranks that hold different data, by default the whole job. Under tensor parallelism pass
            ``self.trainer.strategy.data_parallel_group``.

    Returns:
        fp32 ``[]`` (fp64 for fp64 embeddings). For one query with one positive and no other document it is 0.

    Raises:
        ValueError: for a batch without roles, a model or an option that does not fit, on all ranks.
    """
    similarity = Similarity(
        temperature=temperature,
        symmetric=symmetric,
        normalize=normalize,
        dims=dims,
        dim_weights=dim_weights,
    )
    choice(pooling, "pooling", *get_args(Pooling))
    if group is not None:
        instance(group, "group", dist.ProcessGroup, advice="Pass ranks that hold different data.")

    check_batch(batch)
    note_mean_of_sequences(batch)
    step_and_place = batch.step
    if step_and_place is None or len(step_and_place[0].microbatches) == 1:
        encoder = _encoder(model, pooling, 1, group)
        plan = _plan_table([batch], group)
        embeddings = [encoder.run(batch)]
        if encoder.key is None:
            _require_alike(embeddings, plan)
        table = _gathered(embeddings, plan)
        return _share(table, plan, 0, similarity)

    step, place = step_and_place
    encoder = _encoder(model, pooling, len(step.microbatches), group)
    passes: _Passes = step.kept.setdefault(_Passes, _Passes())
    key = passes.key_of(encoder, place, (similarity, id(group), torch.is_grad_enabled()))
    if place == 0:
        device = unnoted(batch).input_ids.device
        others = [microbatch.to(device) for microbatch in step.microbatches[1:]]
        passes.caches[key] = _first_pass(encoder, [batch, *others], similarity, group)
    elif key not in passes.caches:
        raise _another_call(place)
    return passes.caches[key].value(encoder, batch, place)


def _encoder(model: Any, pooling: Pooling, microbatches: int, group: Any) -> _Encoder:
    """Return how ``info_nce`` gets embeddings from its argument ``model``."""
    if isinstance(model, Tensor):
        if microbatches > 1:
            raise ValueError(
                f"info_nce got the embeddings of one of {microbatches} microbatches, but the loss needs "
                "those of the whole step. Pass the model, or a function from a batch to embeddings."
            )
        return _Encoder(lambda _: model, None)

    if isinstance(model, nn.Module):
        if group is None and group_size(None) > 1:
            _refuse_tensor_parallel(model)
        return _Encoder(partial(embed, model, pooling=pooling), (id(model), pooling))

    if callable(model):
        return _Encoder(model, None)

    raise TypeError(
        f"model is {described(model)}; wanted a model, a function from a batch to embeddings, or embeddings."
    )


class _Passes:
    """The first passes over one step, whose ``_Cache`` the first microbatch computes for all of them.

    A model and the options of a call name its cache. A function is another object in each call, if
    training_step defines it, so the order of a microbatch's calls names its cache; ``_Cache.value`` then
    compares what it returns.
    """

    def __init__(self) -> None:
        self.caches: dict[tuple[Any, ...], _Cache] = {}
        self._place = -1  # the microbatch of the last call with a function
        self._calls = 0  # its number of such calls

    def key_of(self, encoder: _Encoder, place: int, options: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the name of a call's cache."""
        if encoder.key is not None:
            return (*encoder.key, *options)
        if place != self._place:
            self._place = place
            self._calls = 0
            if place == 0:  # the step is run again
                self.caches = {key: cache for key, cache in self.caches.items() if not cache.checks}
        self._calls += 1
        return ("function", self._calls, *options)


def _another_call(place: int) -> ValueError:
    """Return the error for a microbatch whose step had no first pass by the same call."""
    return ValueError(
        f"info_nce got microbatch {place} of a step, but not its first one with the same model and options. "
        "Run all microbatches of a step in order, with the same arguments. A function may hold no option "
        "that changes between them."
    )


def _refuse_tensor_parallel(model: nn.Module) -> None:
    """Raise ValueError if the model is cut by tensor parallelism and no group of ranks was given."""
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if TENSOR in (getattr(mesh, "mesh_dim_names", None) or ()):
            raise ValueError(
                "The model is cut by tensor parallelism, whose ranks read the same documents, so that each "
                "would count several times. Pass group=self.trainer.strategy.data_parallel_group."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _TablePlan:
    """Where the queries and documents of a step are in the gathered table of embeddings."""

    places: list[Places]  # queries, documents and pairs of each microbatch of this rank
    group: Any  # the ranks that hold different data; None for one process
    slots: int  # rows of the table that each rank has; 0 for one process
    queries: NDArray[np.int64]  # the table's rows of all queries, those of rank 0 first
    documents: NDArray[np.int64]  # the table's rows of all documents
    first_query: int  # the index of this rank's first query in ``queries``
    first_document: int
    ranks: int

    def pairs(self, place: int) -> Pairs:
        """Return the pairs of a microbatch as indices of ``queries`` and ``documents``."""
        before = self.places[:place]
        query = self.first_query + sum(len(places.queries) for places in before)
        document = self.first_document + sum(len(places.documents) for places in before)
        pairs: Pairs = self.places[place].pairs + np.array([query, document])
        return pairs


def _plan_table(batches: Sequence[THDBatch], group: Any) -> _TablePlan:
    """Exchange the numbers of queries and documents; all ranks raise if a batch of one is not whole."""
    fault: ValueError | None = None
    places: list[Places] = []
    try:
        places = [_places(unnoted(batch)) for batch in batches]
    except ValueError as error:
        fault = error

    queries = sum(len(of_microbatch.queries) for of_microbatch in places)
    documents = sum(len(of_microbatch.documents) for of_microbatch in places)
    mine = [int(fault is None), len(batches), queries, documents]
    counts = [mine]
    ranks = group_size(group)
    if ranks > 1:
        device = communication_device(group, unnoted(batches[0]).input_ids.device)
        counts = gather_ints(mine, group=group, device=device)
    if fault is not None:
        raise fault

    for rank, (whole, microbatches, *_) in enumerate(counts):
        if not whole or microbatches != len(batches):
            content = f"{microbatches} microbatches, this one {len(batches)}" if whole else "no queries"
            raise ValueError(
                f"Rank {rank} has a step of {content}. Give all ranks parts of the same steps, as "
                "THDDataModule does."
            )

    sizes = np.array(counts)[:, 2:]
    slots = int(sizes.sum(1).max()) if ranks > 1 else 0
    starts = np.arange(ranks) * slots
    rank = dist.get_rank(group) if ranks > 1 else 0
    # In the table, a rank's rows are its queries, then its documents.
    query_rows: list[NDArray[np.int64]] = []
    document_rows: list[NDArray[np.int64]] = []
    for start, (num_queries, num_documents) in zip(starts, sizes, strict=True):
        query_rows.append(start + np.arange(num_queries))
        document_rows.append(start + num_queries + np.arange(num_documents))

    return _TablePlan(
        places=places,
        group=group if group is not None or ranks == 1 else dist.group.WORLD,
        slots=slots,
        queries=np.concatenate(query_rows),
        documents=np.concatenate(document_rows),
        first_query=int(sizes[:rank, 0].sum()),
        first_document=int(sizes[:rank, 1].sum()),
        ranks=ranks,
    )


def _places(batch: THDBatch) -> Places:
    """Return the sequences of a batch that are queries and documents, and the pairs that they form."""
    if batch.roles is None and len(batch.lengths):
        raise ValueError(
            f"The batch has {len(batch.lengths)} sequences without roles. Give records with a 'query', a "
            "'positive' and any 'negative' to THDDataModule or THDBatch.collate."
        )
    return places_of(batch.roles or ())


def _fault_of(embeddings: Sequence[Tensor], plan: _TablePlan) -> ValueError | None:
    """Return what is wrong with the embeddings of this rank's microbatches, or None."""
    for rows, places in zip(embeddings, plan.places, strict=True):
        num_sequences = len(places.queries) + len(places.documents)
        if rows.ndim != 2 or len(rows) != num_sequences or not rows.is_floating_point():
            return ValueError(
                f"The embeddings are {described(rows)}; wanted floats [{num_sequences}, D], one row for each "
                "sequence of the batch. Pool hidden states by batch.pool(hidden)."
            )

    sizes = sorted({rows.shape[1] for rows in embeddings})
    if len(sizes) > 1:
        return ValueError(
            f"The embeddings of a step's microbatches have {sizes} numbers; wanted one size. Return the same "
            "size for every batch."
        )
    return None


def _require_alike(embeddings: Sequence[Tensor], plan: _TablePlan) -> None:
    """Exchange what a function or the caller gave; all ranks raise if one has embeddings that do not fit.

    Without this, the other ranks would wait in the exchange of embeddings. A model that ``embed`` runs needs
    no check: it gives one row for each sequence, of the same size on all ranks.
    """
    if plan.ranks == 1:
        return
    fault = _fault_of(embeddings, plan)
    mine = [0, 0, 0]
    if fault is None:
        wide = torch.promote_types(embeddings[0].dtype, torch.float32)
        mine = [1, embeddings[0].shape[1], wide.itemsize]
    device = communication_device(plan.group, embeddings[0].device)
    every = gather_ints(mine, group=plan.group, device=device)
    if fault is not None:
        raise fault

    for rank, (fits, size, itemsize) in enumerate(every):
        if not fits:
            raise ValueError(
                f"Rank {rank} has embeddings that do not fit its batch; its own error says how. Pool hidden "
                "states by batch.pool(hidden)."
            )
        if [fits, size, itemsize] != mine:
            raise ValueError(
                f"Rank {rank} has embeddings of {size} numbers of {itemsize} bytes, this one of {mine[1]} of "
                f"{mine[2]}. Return embeddings of one size and dtype on all ranks."
            )


def _gathered(embeddings: Sequence[Tensor], plan: _TablePlan) -> Tensor:
    """Return a table with the embeddings of all microbatches and ranks, differentiable."""
    queries = []
    documents = []
    fault = _fault_of(embeddings, plan)
    if fault is not None:
        raise fault

    for rows, places in zip(embeddings, plan.places, strict=True):
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        queries.append(rows.index_select(0, uploaded(places.queries, rows.device)))
        documents.append(rows.index_select(0, uploaded(places.documents, rows.device)))

    table = torch.cat([*queries, *documents])
    if plan.ranks == 1:
        return table
    padded = F.pad(table, (0, 0, 0, plan.slots - len(table)))
    return all_gather_rows(padded, plan.group)


def _share(table: Tensor, plan: _TablePlan, place: int, similarity: Similarity) -> Tensor:
    """Return a microbatch's share of the loss, whose mean over microbatches and ranks is the step's loss."""
    pairs = plan.pairs(place)
    if not len(pairs):
        return table[:0].sum()  # 0, with a gradient, so that this rank takes part in the backward exchange

    queries = table.index_select(0, uploaded(plan.queries, table.device))
    documents = table.index_select(0, uploaded(plan.documents, table.device))
    losses = _losses_of_pairs(queries, documents, pairs, similarity)
    # A query's loss is the mean over its positives.
    positives = np.bincount(pairs[:, 0])[pairs[:, 0]]
    total: Tensor = (losses / uploaded(positives, table.device)).sum()
    if torch.is_grad_enabled():
        total = total * (plan.ranks * len(plan.places) / len(plan.queries))
    else:
        total = total / len(plan.places[place].queries)
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cache:
    """What the first pass over a step leaves for the second, one entry for each microbatch."""

    values: list[Tensor]  # shares of the loss
    gradients: list[Tensor]  # gradients of the sum of all shares, with respect to embeddings ``[S, D]``
    states: list[_RandomState]  # states of the generators before the embeddings were computed
    embeddings: list[Tensor]  # what the first pass computed, if it is compared with the second pass

    @property
    def checks(self) -> bool:
        """Return whether both passes are compared, because their functions have no name."""
        return bool(self.embeddings)

    def value(self, encoder: _Encoder, batch: THDBatch, place: int) -> Tensor:
        """Return a microbatch's share of the loss, with the gradient of the whole step's loss."""
        if not torch.is_grad_enabled() and not self.checks:
            return self.values[place]

        present = _RandomState.of(batch)
        self.states[place].restore()
        embeddings = encoder.run(batch)
        present.restore()
        if self.checks:
            _require_equal(embeddings.detach(), self.embeddings[place], place)
        if not torch.is_grad_enabled():
            return self.values[place]

        # The product has the gradient of the step's loss; its own value cancels.
        gradient = self.gradients[place]
        product = (embeddings.to(gradient.dtype) * gradient).sum()
        return self.values[place] + (product - product.detach())


def _require_equal(again: Tensor, first: Tensor, place: int) -> None:
    """Refuse embeddings of a second pass that differ by more than rounding from those of the first."""
    if again.shape != first.shape:
        raise _another_call(place)
    kind = again.dtype
    if has_autocast(again.device):
        kind = torch.get_autocast_dtype(again.device.type)

    # Rounding errors add up over layers, and both passes may use other kernels.
    bound = torch.finfo(kind).eps ** 0.5
    largest = first.new_zeros(())
    if first.numel():
        largest = first.abs().amax()
    same = ((again - first).abs() <= bound * largest).all()

    if same.device.type != "cpu":  # a read would wait for the device
        torch.ops.aten._assert_async.msg(same, str(_another_call(place)))
    elif not same:
        raise _another_call(place)


class _RandomState(NamedTuple):
    """The state of the generators of the CPU and of a batch's device."""

    cpu: Tensor
    devices: list[int]
    states: list[Tensor]
    device_type: str

    @classmethod
    def of(cls, batch: THDBatch) -> _RandomState:
        """Return the current state."""
        ids = unnoted(batch).input_ids
        return cls(torch.get_rng_state(), *get_device_states(ids), ids.device.type)

    def restore(self) -> None:
        """Continue from this state."""
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.states, device_type=self.device_type)


def _first_pass(encoder: _Encoder, batches: Sequence[THDBatch], similarity: Similarity, group: Any) -> _Cache:
    """Embed all microbatches of a step, and compute the gradients of its loss with respect to embeddings."""
    plan = _plan_table(batches, group)
    states: list[_RandomState] = []
    leaves: list[Tensor] = []
    with torch.no_grad(), trial_runs():  # the second pass is the one that counts
        for batch in batches:
            states.append(_RandomState.of(batch))
            leaves.append(encoder.run(batch))
    if encoder.key is None:
        _require_alike(leaves, plan)

    values: list[Tensor] = []
    compared = leaves if encoder.key is None else []
    if not torch.is_grad_enabled():
        table = _gathered(leaves, plan)
        values = [_share(table, plan, place, similarity) for place in range(len(batches))]
        return _Cache(values=values, gradients=[], states=states, embeddings=compared)

    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    gathered = _gathered(leaves, plan)
    table = gathered.detach().requires_grad_()
    gradient = torch.zeros_like(table)

    for place in range(len(batches)):  # one by one: only one microbatch's similarities are in memory
        value = _share(table, plan, place, similarity)
        gradient += torch.autograd.grad(value, table)[0]
        values.append(value.detach())

    gradients = list(torch.autograd.grad(gathered, leaves, gradient))
    return _Cache(values=values, gradients=gradients, states=states, embeddings=compared)
