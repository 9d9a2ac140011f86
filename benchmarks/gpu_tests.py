"""``pytest -m gpu``, folder by folder: each a part of ``python -m benchmarks.gpu``."""

from __future__ import annotations

from benchmarks.gpu_parts import Part, add

# Attention's comparisons with fp64 are the part attention_equal, which proves the README's rows by them.
_OTHERS = ("tests/attention", "-k", "not equals_fp64")

for _rank, _name, _seconds, _shows, _tests in (
    (11, "test_attention", 20, "calls on a device are refused or never wait", _OTHERS),
    (
        12,
        "test_cuda_graph",
        60,
        "replays equal eager; failed captures leave all usable",
        ("tests/cuda_graph",),
    ),
    (40, "test_loss", 45, "losses equal fp32 at a fraction of the memory", ("tests/loss",)),
    (41, "test_throughput", 20, "steps never wait for the device", ("tests/callbacks",)),
    (
        42,
        "test_models",
        90,
        "losses, families and compiled models equal the CPU",
        ("tests/gpu/test_models.py",),
    ),
    (43, "test_ranks", 150, "layouts on NCCL equal one process", ("tests/gpu/test_ranks.py", "-v")),
    (
        44,
        "test_precision",
        80,
        "FP8 recipes run, captured too",
        ("tests/precision", "-m", "gpu and not slow"),
    ),
    (45, "test_examples", 400, "README and examples run and never wait", ("tests/gpu/test_examples.py",)),
):
    add(Part(name=_name, shows=_shows, seconds=_seconds, rank=_rank, tests=_tests))
