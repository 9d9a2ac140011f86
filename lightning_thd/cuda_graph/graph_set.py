"""A step and its buckets -> the captured graphs of all of them, one set for each state of torch's modes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.tensor import DTensor

from lightning_thd.cuda_graph.capture.capture import Shared, capture_step
from lightning_thd.cuda_graph.capture.captured import CapturedStep
from lightning_thd.cuda_graph.capture.gradients import PIECE_BYTES
from lightning_thd.cuda_graph.capture.layers import GraphedLayers
from lightning_thd.cuda_graph.capture.proof import prove
from lightning_thd.cuda_graph.capture.subject import Example, Subject
from lightning_thd.cuda_graph.choice.timing import compare
from lightning_thd.cuda_graph.errors import CaptureError
from lightning_thd.cuda_graph.limits.fingerprint import Fingerprint
from lightning_thd.cuda_graph.shapes.buckets import Bucket
from lightning_thd.parallel.agreement import all_agree
from lightning_thd.parallel.shard import THDShard

Context = tuple[Any, ...]
Graphs = dict[Bucket, CapturedStep]


class GraphSet:
    """All captured buckets of a step, which are captured together and dropped together.

    Args:
        subject: what is captured.
        buckets: shapes, ascending.
        layers: names of layers to capture in place of the whole step.

    Attributes:
        slower: buckets whose replay was measured to be no faster than eager.
        rounds: captures so far, of all buckets each.
    """

    def __init__(self, subject: Subject, buckets: Sequence[Bucket], layers: Sequence[str]) -> None:
        self.slower: set[Bucket] = set()
        self.rounds = 0
        self._subject, self._buckets = subject, buckets
        self._layers = GraphedLayers(subject.backend, layers) if layers else None
        self._captured: dict[Context, Graphs] = {}
        self._fingerprint: Fingerprint | None = None
        self._shared = Shared()

    @property
    def pending(self) -> bool:
        """Return whether a replay's backward is outstanding, whose memory another replay would overwrite."""
        return self._shared.turn.pending or (self._layers is not None and self._layers.pending)

    def change(self) -> str | None:
        """Return what has changed about the module since its graphs were captured, or None."""
        return None if self._fingerprint is None else self._fingerprint.change()

    def find(self, example: Example) -> Graphs | None:
        """Return the graphs captured under torch's present modes, or None."""
        return self._captured.get(_context(example))

    def capture(self, example: Example) -> Graphs:
        """Capture every bucket for torch's present modes.

        Ranks that share no model come together here at the first capture, and may recapture alone; those of
        a model-parallel group always run together.

        Raises:
            Exception: whatever stops a capture, on this or another rank.
        """
        together = (
            self.rounds == 0
            or isinstance(example.batch, THDShard)
            or any(isinstance(parameter, DTensor) for parameter in self._subject.module.parameters())
        )
        found = self._try_capture(example)
        failed = isinstance(found, Exception)
        agreed = all_agree(not failed, example.device) if together else not failed
        if isinstance(found, Exception):
            try:
                raise found
            finally:
                del found  # else this frame and the error keep each other, and with them the batch
        if not agreed:
            raise CaptureError("the capture failed on another rank, whose message says why.")
        self._captured[_context(example)] = found
        every = [step.reads for graphs in self._captured.values() for step in graphs.values()]
        reads = functools.reduce(operator.or_, every)
        self._fingerprint = Fingerprint(
            self._subject.module, reads, None if self._layers else self._subject.function
        )
        self.rounds += 1
        self._find_slower(found, example, together=together)
        return found

    def close(self) -> None:
        """Drop all graphs and their memory."""
        self._captured.clear()
        self._fingerprint = None
        if self._layers is not None:
            self._layers.remove()
        self._subject.backend.release()

    def _try_capture(self, example: Example) -> Graphs | Exception:
        subject, captured = self._subject, {}
        piece_bytes = PIECE_BYTES if _is_distributed() else None
        try:
            missing = subject.backend.unavailable(example.device)
            if missing is not None:
                raise CaptureError(f"{missing}.")
            for bucket in reversed(self._buckets):  # the largest first: the smaller ones reuse its memory
                captured[bucket] = capture_step(
                    subject, bucket, example, self._shared, self._layers, piece_bytes=piece_bytes
                )
            for step in captured.values():
                prove(subject, step, example)
        except Exception as error:
            return error
        return captured

    def _find_slower(self, captured: Graphs, example: Example, *, together: bool) -> None:
        for bucket, step in captured.items():
            times = compare(self._subject, step, example)
            if times is None:
                return
            faster = not times.slower
            if all_agree(faster, example.device) if together else faster:
                continue
            self.slower.add(bucket)
            rank_zero_info(
                f"CUDA graph of {bucket}: a replay takes {times.replay_s * 1e3:.2f} ms and eager "
                f"{times.eager_s * 1e3:.2f} ms on this or another rank, so batches of this size run eagerly."
            )


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _context(example: Example) -> Context:
    """Return the modes of torch that decide what an operator does, and that a graph has baked in."""
    kind = example.device.type
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
