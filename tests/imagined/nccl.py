"""An NCCL for imagined GPUs: ``init_process_group("nccl")`` sends the bytes through gloo. See README.md.

``with imagined_gpu(devices=2), imagined_nccl() as calls`` lists (kind, text, thread, stream, step, caller).
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sysconfig
import threading
import types
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.imagined import gpu as imagined

HERE = Path(__file__).parent


def _build() -> Path:
    source = HERE / "nccl.cpp"
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    out = imagined.BUILT / f"imagined_nccl_{key}.so"
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / "lock").open("w") as lock:  # one rank compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        _compile(out)
    return out


def _compile(out: Path) -> None:
    source = HERE / "nccl.cpp"
    if not out.exists():
        root = Path(torch.__file__).parent
        part = out.with_suffix(f".{os.getpid()}.part")
        subprocess.run(
            [
                "g++",
                "-O1",
                "-shared",
                "-fPIC",
                "-std=c++20",
                "-w",
                "-DUSE_DISTRIBUTED",
                "-DUSE_C10D_GLOO",
                "-DTORCH_EXTENSION_NAME=imagined_nccl_ext",
                f"-I{root}/include",
                f"-I{root}/include/torch/csrc/api/include",
                f"-I{sysconfig.get_paths()['include']}",
                str(source),
                f"-L{root}/lib",
                "-lc10",
                "-ltorch_cpu",
                "-ltorch",
                "-ltorch_python",
                f"-Wl,-rpath,{root}/lib",
                "-o",
                str(part),
            ],
            check=True,
        )
        part.rename(out)


def _load():
    spec = importlib.util.spec_from_file_location("imagined_nccl_ext", _build())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ext = _load()


class Options:
    """ProcessGroupNCCL.Options: a bag of attributes."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream, self._timeout, self.config = (
            is_high_priority_stream,
            timedelta(minutes=10),
            types.SimpleNamespace(),
        )
        self.group_name, self.group_desc, self.global_ranks_in_group, self.split_from, self.split_color = (
            "",
            "",
            [],
            None,
            None,
        )
        self.backend = "nccl"

    @property
    def timeout(self):
        return self._timeout


_alive = []


class ProcessGroupNCCL(ext.ImaginedNCCL):
    Options = Options

    def __init__(self, store, rank, size, options=None, timeout=None):
        options = options or Options()
        wait = timedelta(seconds=float(os.environ.get("IMAGINED_NCCL_TIMEOUT", "60")))
        inner = dist.ProcessGroupGloo(dist.PrefixStore("imagined_gloo", store), rank, size, timeout=wait)
        inner._set_sequence_number_for_group()
        self.options, self._inner = options, inner
        name = f"{options.group_name or '?'}({','.join(map(str, options.global_ranks_in_group))})"
        self.label = name
        super().__init__(inner, store, rank, size, name, int(wait.total_seconds() * 1000))
        _alive.append(self)

    def _set_sequence_number_for_group(self):
        pass

    def perform_nocolor_split(self, device):
        pass

    def _is_initialized(self):
        return True


def _split_group(self, ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None):
    """ProcessGroup.split_group: ncclCommSplit, which all ranks of the parent call."""
    parent = self._get_backend(torch.device("cuda"))
    members = sorted(ranks)
    TRACED("call", f"{parent.label} split")
    if self.rank() not in members:
        return None
    store = dist.PrefixStore(f"{group_name}/", self.get_group_store())
    group = dist.ProcessGroup(store, members.index(self.rank()), len(members))
    options = Options()
    options.group_name, options.group_desc, options.global_ranks_in_group = (
        group_name,
        group_desc or "",
        [dist.get_global_rank(self, r) for r in members],
    )
    if timeout is not None:
        options._timeout = timeout
    backend = ProcessGroupNCCL(store, members.index(self.rank()), len(members), options)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._set_group_name(group_name)
    group._set_group_desc(group_desc or "")
    backend.eager_connect_single_device(
        self.bound_device_id or torch.device("cuda", torch.cuda.current_device())
    )
    return group


@contextlib.contextmanager
def imagined_nccl():
    calls = []
    main = threading.main_thread()

    def traced(kind, text):
        thread = threading.current_thread()
        named = (
            "main"
            if thread is main
            else thread.name
            if not thread.name.startswith("Dummy")
            else "autograd or other C++ thread"
        )
        calls.append(
            (kind, text, named, imagined._lib.imagined_get_stream(), imagined.LOG.step, imagined.caller())
        )
        if kind == "host waits":
            imagined._told(b"read", ("nccl " + text.split()[-1]).encode(), 0, 0)
        path = os.environ.get("IMAGINED_NCCL_TRACE")
        if path:
            with open(f"{path}.{os.environ.get('RANK', os.environ.get('LOCAL_RANK', '0'))}", "a") as out:
                out.write("\t".join(map(str, calls[-1])) + "\n")

    with contextlib.ExitStack() as stack:

        def put(o, k, v):
            return stack.enter_context(mock.patch.object(o, k, v, create=True))

        put(c10d, "ProcessGroupNCCL", ProcessGroupNCCL)
        put(dist, "ProcessGroupNCCL", ProcessGroupNCCL)
        put(torch._C._distributed_c10d, "ProcessGroupNCCL", ProcessGroupNCCL)
        put(c10d, "_NCCL_AVAILABLE", True)
        put(c10d, "_DEFAULT_PG_NCCL_TIMEOUT", timedelta(minutes=10))
        put(torch.cuda.nccl, "version", lambda: (2, 27, 5))
        put(torch.cuda.nccl, "is_available", lambda *a: True)
        put(dist.ProcessGroup, "split_group", _split_group)
        global TRACED
        TRACED = traced
        ext.set_tracer(traced)
        try:
            yield calls
        finally:
            ext.set_tracer(None)


def write_traffic(folder: Path, job: str) -> None:
    """Write which lines of this rank read or uploaded, how often; every rank has a file of its own."""
    log = imagined.LOG
    rows = [("read", *row) for row in log.reads]
    rows += [
        ("upload", "pinned" if pinned else "pageable", "free" if free else "blocking", place)
        for _, _, pinned, free, place in log.uploads
    ]
    rows += [("lost", call[1], call[-1]) for call in CALLS if call[0] == "never waited"]
    lines = [f"{n}\t" + "\t".join(map(str, row)) for row, n in Counter(rows).most_common()]
    with (folder / f"{job}.{os.getpid()}").open("w") as out:
        out.write("\n".join(lines))


CALLS = []  # of this process, if it is a rank


def join_gpus(rank: int, world_size: int, store: Path) -> None:
    """Make this process, to its end, a rank of imagined GPUs; its Trainers take them in place of the CPU."""
    global CALLS
    stack = contextlib.ExitStack()
    _alive.append(stack)
    stack.enter_context(imagined.imagined_gpu(devices=world_size))
    CALLS = stack.enter_context(imagined_nccl())
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world_size)
    import lightning.pytorch as L

    filters = warnings.simplefilter  # what the imagination warns of is no error

    def never_an_error(action, *args, **options):
        filters("ignore" if action == "error" else action, *args, **options)

    warnings.simplefilter = never_an_error
    made = L.Trainer.__init__

    def init(self, *args, **options):
        made(self, *args, **{**options, "accelerator": "gpu"})

    L.Trainer.__init__ = init
