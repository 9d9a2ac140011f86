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
):
    add(Part(name=_name, shows=_shows, seconds=_seconds, rank=_rank, tests=_tests))
