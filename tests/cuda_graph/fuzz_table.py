"""Public functions of cuda_graph, for ``tests.fuzz``."""

from __future__ import annotations

import random
from typing import Any

import torch

from lightning_thd import causal_lm_loss, cuda_graph
from lightning_thd.cuda_graph.recording import RecordingBackend
from tests.batch.fuzz_table import BATCH
from tests.fuzz import Entry
from tests.tiny import tiny_llama

MODEL = tiny_llama(torch.float32)
BUCKETS = cuda_graph.make_buckets((4, 8), slots=16, max_seqlen=8)


def _step(rng: random.Random) -> dict[str, Any]:
    return {
        "function": causal_lm_loss,
        "module": MODEL,
        "buckets": rng.choice([BUCKETS, BUCKETS[:1]]),
        "require": rng.random() < 0.5,
        "batch": BATCH,
    }


def _run(*, batch: Any, **given: Any) -> Any:
    return cuda_graph.GraphedStep(backend=RecordingBackend(), **given)(batch)


TABLE = {
    "cuda_graph.Bucket": Entry(
        cuda_graph.Bucket, lambda rng: {"slots": 16, "sequences": rng.choice([4, 8]), "max_seqlen": 8}
    ),
    "cuda_graph.make_buckets": Entry(
        cuda_graph.make_buckets,
        lambda rng: {"max_sequences": [4, 8], "slots": 16, "max_seqlen": rng.choice([None, 8])},
    ),
    "cuda_graph.GraphCosts": Entry(
        cuda_graph.GraphCosts, lambda rng: {"eager": 1.0, "graph": rng.random() + 0.1, "per_sequence": 1e-3}
    ),
    "cuda_graph.GraphStats": Entry(
        cuda_graph.GraphStats, lambda _: {"replays": 1, "captures": 1, "capture_s": 0.5}
    ),
    "cuda_graph.GraphedStep": Entry(_run, _step, also=(cuda_graph.CaptureError,)),
    "cuda_graph.lint_capture": Entry(
        cuda_graph.lint_capture, lambda _: {"module": MODEL, "batch": BATCH, "step": causal_lm_loss}
    ),
}
