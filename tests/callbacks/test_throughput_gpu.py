"""On a CUDA device: the hooks of a step wait for nothing, and MFU comes from the table or from matmuls."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_thd.callbacks import THDThroughputMonitor
from lightning_thd.flops import measure_flops, peak_flops
from tests.callbacks.fits import Clock, Memory, Module, loader, pack, trainer
from tests.device_reads import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_steps_between_logs_never_wait_for_the_device(tmp_path: Path) -> None:
    watched = THDThroughputMonitor(peak=1e12, warmup_steps=1)
    for name in ("on_train_batch_start", "on_train_batch_end"):
        original = getattr(watched, name)

        def strict(run: Any, module: Any, *args: Any, original: Any = original) -> None:
            quiet = 2 < args[-1] < 9  # after the warm-up, before the log
            with no_waiting() if quiet else contextlib.nullcontext():
                original(run, module, *args)

        setattr(watched, name, strict)
    memory = Memory()
    run = trainer(tmp_path, watched, accelerator="gpu", logger=memory, log_every_n_steps=10)
    run.fit(Module(Clock()), loader([pack(5, 3)] * 10))
    assert memory.rows[-1][1]["train/device/mfu"] > 0


def test_a_measured_peak_is_within_the_vendors() -> None:
    vendor = peak_flops(torch.cuda.get_device_name(), torch.bfloat16)
    if vendor is None:
        pytest.skip(f"{torch.cuda.get_device_name()} has no row")
    assert 0.3 * vendor < measure_flops("cuda", dtype=torch.bfloat16) < 1.1 * vendor
