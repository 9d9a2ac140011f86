"""A process that leaves a loop over a stream or a dataset at any moment ends with 0 and leaves no thread."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.scripts import run_python

# A forked process calls `os._exit` when all handlers have run: tests/scripts.py. Here it ends as Python does.
SCRIPT = """
import ctypes, os, random, sys, threading, time

def look_and_end(code):
    left = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if left:
        print("threads are left:", left, flush=True)
    ctypes.pythonapi.Py_Exit(3 if left else code)

os._exit = look_and_end
import torch
from lightning_thd import Sequences, THDDataModule
from lightning_thd.data.streams import Stream

class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            square = torch.randn(64, 64) @ torch.randn(64, 64)
            yield {"input_ids": torch.randint(0, 60, (int(square.abs().sum()) % 20 + 2,))}

def leave(random):
    rows = [{"input_ids": [i % 60] * 9} for i in range(300)]
    train = Stream(Rows(), window=8) if random.random() < 0.7 else rows
    data = THDDataModule(train, capacity=64, global_batch=Sequences(random.choice([4, 64])))
    data.setup("fit")
    loader = data.train_steps()
    steps = iter(loader)
    for _ in range(random.randrange(1, 5)):
        next(steps)
    time.sleep(random.random() * 0.05)
    how = random.randrange(4)
    if how == 0:
        del steps, loader, data
    elif how == 1:
        next(iter(loader))
    elif how == 2:
        globals()["kept"] = steps
    sys.exit(0)

for seed in range(int(sys.argv[1])):
    pid = os.fork()
    if not pid:
        leave(random.Random(seed))
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"seed {seed} ended with {status}")
"""


@pytest.mark.parametrize("count", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_processes_end_whenever_they_leave_a_loop(count: int) -> None:
    run_python("-c", SCRIPT, count, timeout_s=600.0)


_WORKING = """
import sys, time
from lightning_thd import THDDataModule
kind, folder = sys.argv[1:]
short = [{"input_ids": [1, 2]}] * 100_000
source = folder + "/d.jsonl" if kind == "tokenising" else short
data = THDDataModule(source, capacity=50_000, num_workers=1, cache_dir=folder)
data.setup("fit")
print("ready", flush=True)
for batch in data.train_dataloader():
    time.sleep(1)
"""


@pytest.mark.parametrize("kind", ["tokenising", pytest.param("loading", marks=pytest.mark.slow)])
def test_workers_end_with_a_killed_process(kind: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(f'{{"text": "{"a" * 2000}"}}\n' * 16_000)
    command = [sys.executable, "-W", "ignore", "-c", _WORKING, kind, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        if kind == "loading":
            job.stdout.readline()  # the workers that count have ended
        while not any("pt_data" in x.name() for x in psutil.Process(job.pid).children()):
            assert job.poll() is None
            time.sleep(0.01)
        time.sleep(0.3)
        job.send_signal(signal.SIGSTOP)  # it reads no more, and the workers' queues fill up
        workers = psutil.Process(job.pid).children()
        time.sleep(1.5)
        job.kill()
        _, alive = psutil.wait_procs(workers, timeout=20)
        for worker in alive:
            worker.kill()
    assert not alive
