"""An NCCL for imagined GPUs: ``init_process_group("nccl")`` sends the bytes through gloo. See README.md.

``with imagined_gpu(devices=2), imagined_nccl() as calls`` lists (kind, text, caller).
"""

import contextlib
import importlib.util
import sysconfig
import types
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.imagined import gpu as imagined


def _load():
    options = ["-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-DTORCH_EXTENSION_NAME=imagined_nccl_ext"]
    library = imagined.compiled("nccl", *options, f"-I{sysconfig.get_paths()['include']}")
    spec = importlib.util.spec_from_file_location("imagined_nccl_ext", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ext = _load()


class Options:
    """ProcessGroupNCCL.Options: a bag of attributes."""

    backend = "nccl"
    group_name = ""
    group_desc = ""
    split_from = None
    split_color = None

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.global_ranks_in_group = []
        self.config = types.SimpleNamespace()

    @property
    def timeout(self):
        return self._timeout


_alive = []


class ProcessGroupNCCL(ext.ImaginedNCCL):
    Options = Options

    def __init__(self, store, rank, size, options=None, timeout=None):
        options = options or Options()
        wait = timedelta(seconds=60)
        inner = dist.ProcessGroupGloo(dist.PrefixStore("imagined_gloo", store), rank, size, timeout=wait)
        inner._set_sequence_number_for_group()
        self.options = options
        self._inner = inner
        self.label = f"{options.group_name or '?'}({','.join(map(str, options.global_ranks_in_group))})"
        super().__init__(inner, store, rank, size, self.label, int(wait.total_seconds() * 1000))
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
    options.group_name = group_name
    options.group_desc = group_desc or ""
    options.global_ranks_in_group = [dist.get_global_rank(self, r) for r in members]
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

    def traced(kind, text):
        calls.append((kind, text, imagined.caller()))
        if kind == "host waits":
            imagined._told(b"read", ("nccl " + text.split()[-1]).encode(), 0, 0)

    with contextlib.ExitStack() as stack:

        def put(o, k, v):
            return stack.enter_context(mock.patch.object(o, k, v, create=True))

        for module in (c10d, dist, torch._C._distributed_c10d):
            put(module, "ProcessGroupNCCL", ProcessGroupNCCL)
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

    made = L.Trainer.__init__

    def init(self, *args, **options):
        made(self, *args, **{**options, "accelerator": "gpu"})

    L.Trainer.__init__ = init
