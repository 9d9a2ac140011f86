"""A function that runs on the CPU -> the most bytes that torch's allocator held, by torch's profiler."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.profiler import ProfilerActivity, profile


def peak_of(run: Callable[[], object]) -> int:
    """Return the largest number of bytes that ``run`` held at once, beyond what was there before."""
    # What an earlier profile has seen and nobody holds any more would count as freed by this run.
    gc.collect()
    # acc_events changes nothing in one cycle; without it, torch 2.11 warns that it forgets earlier cycles.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [(event["ts"], event["args"]) for event in events if event["name"] == "[memory]"]
    ours: dict[int, int] = {}  # address -> bytes, of what this run allocated
    held = peak = 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        address, size = change["Addr"], change["Bytes"]
        if size > 0:
            ours[address] = size
            held += size
        else:
            held -= ours.pop(address, 0)  # a tensor from before may be freed meanwhile, by any thread
        peak = max(peak, held)
    assert peak > 0, "the profiler reported no allocation"
    return peak
