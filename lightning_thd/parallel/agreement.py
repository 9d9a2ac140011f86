"""Numbers of all ranks -> an error on every rank when ranks do not agree."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.parallel.across_ranks import gather_ints
from lightning_thd.parallel.mesh import AxisSizes


def all_agree(agrees: bool, device: torch.device) -> bool:
    """Return whether every rank of the job agrees."""
    return all(vote for (vote,) in gather_ints([int(agrees)], group=None, device=device))


def require_same(
    value: int, device: torch.device, message: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raise ValueError with the message, on every rank of a group, unless all have the same number."""
    if len({found for (found,) in gather_ints([value], group=group, device=device)}) > 1:
        raise ValueError(message)


def digests(batch: THDBatch | THDStep) -> tuple[int, int]:
    """Hash a batch to two int63: all of it, which peers share, and what every rank of the job shares.

    All ranks share the number of microbatches and the loss scale of a step.
    """
    own = batch.microbatches if isinstance(batch, THDStep) else (batch,)
    everything = hashlib.sha256()
    for one in own:
        everything.update(repr((one.sequence_ids, one.lengths)).encode())
        for row in (one.input_ids, one.token_targets, one.token_offsets):
            everything.update(row.cpu().numpy().tobytes())
    # Evaluation scales every batch by its own tokens; a step has one scale for all.
    shared = [len(own), *(one.loss_scale for one in own[:1])] if isinstance(batch, THDStep) else [1]
    everything.update(repr([one.loss_scale for one in own]).encode())
    return _int63(everything.digest()), _int63(hashlib.sha256(repr(shared).encode()).digest())


def check_agreement(batch: THDBatch | THDStep, sizes: AxisSizes, device: torch.device) -> None:
    """Raise, on every rank, unless peers hold the same batch and all ranks run the same step."""
    found = gather_ints(digests(batch), group=None, device=device)
    for data in range(sizes.data):
        ranks = sizes.readers(data)
        if len({found[rank][0] for rank in ranks}) > 1:
            raise ValueError(
                f"Ranks {', '.join(map(str, ranks))} share one pack ({sizes.context} context-parallel x "
                f"{sizes.tensor} tensor-parallel ranks) but read different ones. Give samplers and datasets "
                "the rank and size of strategy.distributed_sampler_kwargs, and the same seed everywhere."
            )
    if len({shared for _, shared in found}) > 1:
        raise ValueError(
            "Ranks are about to run steps of different numbers of microbatches or loss scales, which hangs "
            "or changes the loss. Plan steps from the same lengths and seed on every rank, as THDDataModule "
            "does."
        )


def _int63(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") >> 1
