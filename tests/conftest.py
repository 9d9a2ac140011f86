"""Hypothesis without a deadline: how long an example takes says nothing on a busy machine.

cuBLAS is told its workspace before it starts: without, a deterministic product on a GPU warns, an error here.
A test may silence loggers; the next one, of any file, hears them again.
"""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("repository", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repository")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric", "torch.distributed", "transformers", "trl")

# These files take longest. They run first, so that no worker is left with one of them at the end.
_LONG = (
    "test_docs",
    "test_examples",
    "test_sample",
    "test_pipeline",
    "test_graphed_step",
    "test_hf_trainer",
    "test_loops",
    "test_dynamic",
    "test_trainer_use",
    "test_mixing",
    "test_families",
    "test_compile",
    "test_chaos",
    "test_layouts",
    "test_matrix",
    "test_hosts",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in _LONG)


@pytest.fixture(autouse=True)
def _loggers_speak_again() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    yield
    logging.disable(logging.NOTSET)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
