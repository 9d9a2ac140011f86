"""Cold caches under many processes, and kills while they are filled -> what was built and is whole.

``python -m tests.trust.caches [--starts 300] [--kills 20]`` ends in a table of ``benchmarks/TRUST.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lightning_thd.data.store.cache import build_once
from tests.trust.record import record

_PROCESSES = 6
_JOB = """
import sys
from tests.data.support import open_source
store = open_source(sys.argv[1], cache_dir=sys.argv[2], num_workers=1)
print(len(store), store.fingerprint)
"""


def _build(folder: str, barrier: Any, queue: Any) -> None:
    built = []

    def build(place: Path) -> None:
        built.append(1)
        for name in "abc":
            (place / name).write_text(name * 1000)

    barrier.wait()
    try:
        mine = build_once(Path(folder), build)
        whole = all((Path(folder) / name).read_text() == name * 1000 for name in "abc")
        queue.put((mine, len(built), whole))
    except BaseException as err:
        queue.put(repr(err))


def cold_starts(rounds: int, folder: Path) -> dict[str, int]:
    """Start six processes at once on a cache that is not there: one builds it, and all find it whole."""
    fork = get_context("fork")
    for k in range(rounds):
        barrier = fork.Barrier(_PROCESSES)
        queue = fork.Queue()
        arguments = (str(folder / f"{k}" / "cache"), barrier, queue)
        processes = [fork.Process(target=_build, args=arguments) for _ in range(_PROCESSES)]
        for process in processes:
            process.start()
        seen = [queue.get(timeout=120) for _ in processes]
        for process in processes:
            process.join()
        assert sorted(seen, key=str) == [(False, 0, True)] * (_PROCESSES - 1) + [(True, 1, True)], (
            k,
            seen,
        )
        assert os.listdir(folder / f"{k}") == ["cache"]
        shutil.rmtree(folder / f"{k}")

    return {"cold starts": rounds, "builds": rounds, "errors": 0}


def kills(count: int, folder: Path, *, lines: int = 20_000) -> dict[str, int]:
    """Kill (SIGKILL) a process that tokenises, at random moments, and let another go on where it stopped.

    Every cache is killed five times over. Its tokens must be those of a process that was never killed.
    """
    file = folder / "d.jsonl"
    rng = random.Random(count)
    with file.open("w") as out:
        for k in range(lines):
            out.write(json.dumps({"text": f"{k} " + "x" * rng.randrange(2_000)}) + "\n")
    command = [sys.executable, "-W", "ignore", "-c", _JOB, str(file)]

    def run(cache: Path) -> str:
        done = subprocess.run([*command, str(cache)], capture_output=True, text=True, check=True)
        return done.stdout

    began = time.monotonic()
    expected = run(folder / "whole")
    alone = time.monotonic() - began
    caches = [folder / f"c{k}" for k in range(max(1, count // 5))]
    inside = 0
    for k in range(count):
        cache = caches[k % len(caches)]
        job = subprocess.Popen([*command, str(cache)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60 + 9 * alone
        while job.poll() is None and not list(cache.glob(".tokens-*.unfinished")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(rng.random() * alone / 20)
        inside += job.poll() is None and bool(list(cache.glob(".tokens-*.unfinished")))
        job.kill()
        job.wait()
    for cache in caches:
        assert run(cache) == expected
        left = [path.name for path in cache.iterdir() if not path.name.startswith("tokens-")]
        assert not left, left
    return {"killed while it tokenised": inside, "killed before or after": count - inside, "wrong stores": 0}


def main() -> None:
    """Run both and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=300, help="cold starts of six processes")
    parser.add_argument("--kills", type=int, default=20, help="kills of a process that tokenises")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = cold_starts(options.starts, Path(folder)) | kills(options.kills, Path(folder))
    record("caches", rows)


if __name__ == "__main__":
    main()
