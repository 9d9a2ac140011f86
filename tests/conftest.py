"""Hypothesis without a deadline: how long an example takes says nothing on a busy machine.

cuBLAS is told its workspace before it starts: without, a deterministic product on a GPU warns, an error here.
A test may silence loggers; the next one, of any file, hears them again.
Nothing is garbage while the tests are collected, and to look for it takes seconds.
"""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import pytest
from hypothesis import HealthCheck, settings
from packaging.version import Version

gc.disable()

settings.register_profile("repository", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repository")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Whether there is a GPU is asked without starting CUDA: a process that is forked afterwards could not use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Lightning and Accelerate find out by these whether a process is one of several.
_RANK_VARIABLES = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE")
_LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric", "torch.distributed", "transformers", "trl")

# These files take longest. They run first, so that no worker is left with one of them at the end.
_LONG = {
    *("test_docs", "test_examples", "test_sample", "test_import", "test_quickstart", "test_trust"),
    *("test_loops", "test_hf_trainer", "test_hf_streams", "test_hf_rows", "test_hf_evaluation"),
    *("test_layouts", "test_dynamic", "test_checkpoints", "test_pipeline_modules", "test_attacks"),
    *("test_pipeline", "test_step_loop", "test_matrix", "test_hosts", "test_chaos", "test_main"),
    *("test_graphed_step", "test_context_parallel", "test_cuda_graph", "test_compile", "test_probe"),
    *("test_backward", "test_families", "test_trainer_use", "test_mixing", "test_datamodule"),
}


def pytest_configure(config: pytest.Config) -> None:
    """Let datasets before 5.2 leave the CSV files open that it has read; elsewhere that is an error."""
    with suppress(PackageNotFoundError):
        if Version(version("datasets")) < Version("5.2"):
            config.addinivalue_line("filterwarnings", r"ignore:unclosed file <_io.*[.][ct]sv")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in _LONG)


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _older_objects_are_not_looked_at_again() -> None:
    """Captures of graphs and rows of cells collect garbage: half a second among a million older objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_is_left() -> Iterator[None]:
    """A Trainer with ranks starts a process group and sets the environment; the next file has neither."""
    before = {name: os.environ.get(name) for name in _RANK_VARIABLES}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return
    torch.distributed.destroy_process_group()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _loggers_speak_again() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    yield
    logging.disable(logging.NOTSET)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(autouse=True)
def _products_are_as_precise_as_before() -> Iterator[None]:
    """torchao before 0.18 leaves fp32 products at "high", and ours do not use oneDNN then."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_float32_matmul_precision()
    yield
    if before is not None and torch.get_float32_matmul_precision() != before:
        torch.set_float32_matmul_precision(before)
