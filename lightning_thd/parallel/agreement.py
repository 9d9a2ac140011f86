"""Numbers of all ranks -> an error on every rank when ranks do not agree."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.parallel.mesh import AxisSizes


def gather_numbers(
    numbers: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[tuple[int, ...]]:
    """Return the numbers (int64) of every rank of a group, in the order of ranks; one all-gather."""
    mine = torch.tensor(numbers, dtype=torch.int64).to(device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [tuple(row) for row in torch.stack(rows).tolist()]


def odd_one(values: Sequence[Hashable]) -> int | None:
    """Return the first place whose value differs from the first value; None if all are equal."""
    return next((place for place, value in enumerate(values) if value != values[0]), None)


def all_agree(agrees: bool, device: torch.device) -> bool:
    """Return whether every rank agrees; in a single process, return this one's answer."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return agrees
    return all(vote for (vote,) in gather_numbers([int(agrees)], device))


def require_same(
    value: int, device: torch.device, message: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raise ValueError with the message, on every rank of a group, unless all have the same number."""
    if odd_one(gather_numbers([value], device, group)) is not None:
        raise ValueError(message)


def digests(batch: THDBatch | THDStep) -> tuple[int, int]:
    """Hash a batch to two int63: all of it, which peers share, and what every rank of the job shares.

    All ranks share the number of microbatches and the loss scale of a step.
    """
    own = batch.microbatches if isinstance(batch, THDStep) else (batch,)
    everything = hashlib.sha256()
    for one in own:
        everything.update(repr((one.sequence_ids, one.lengths, one.padded_lengths)).encode())
        everything.update(one.input_ids.cpu().numpy().tobytes())
        everything.update(one.targets.cpu().numpy().tobytes())
    # Evaluation scales every batch by its own tokens; a step has one scale for all.
    shared = [len(own), *(one.loss_scale for one in own[:1])] if isinstance(batch, THDStep) else [1]
    everything.update(repr([one.loss_scale for one in own]).encode())
    return _int63(everything.digest()), _int63(hashlib.sha256(repr(shared).encode()).digest())


def check_agreement(batch: THDBatch | THDStep, sizes: AxisSizes, device: torch.device) -> None:
    """Raise, on every rank, unless peers hold the same batch and all ranks run the same step."""
    found = gather_numbers(digests(batch), device)
    for data in range(sizes.data):
        ranks = sizes.readers(data)
        if odd_one([found[rank][0] for rank in ranks]) is not None:
            raise ValueError(
                f"Ranks {', '.join(map(str, ranks))} share one pack ({sizes.context} context-parallel x "
                f"{sizes.tensor} tensor-parallel ranks) but read different ones. Give samplers and datasets "
                "the rank and size of strategy.distributed_sampler_kwargs, and the same seed everywhere."
            )
    if odd_one([shared for _, shared in found]) is not None:
        raise ValueError(
            "Ranks are about to run steps of different numbers of microbatches or loss scales, which hangs "
            "or changes the loss. Plan steps from the same lengths and seed on every rank, as THDDataModule "
            "does."
        )


def _int63(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") >> 1
