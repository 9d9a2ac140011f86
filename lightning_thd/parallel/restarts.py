"""torchrun's environment after a restart -> a process group that sees nothing of the ranks that died."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection


def begin_again(strategy: Any) -> None:
    """Start the process group of a job that torchrun has started again, before Lightning would.

    torchrun's agent keeps one store over all starts of a job, where the addresses of dead ranks still stand:
    ranks that look there connect to nobody, and hang or end in "Connection refused". Here every start has
    keys of its own. Does nothing in a first start, without torchrun, or where a group exists.
    """
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    environment = getattr(strategy, "cluster_environment", None)
    if start == "0" or not shared or environment is None or dist.is_initialized():
        return
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    options = {"timeout": timeout} if (timeout := getattr(strategy, "_timeout", None)) is not None else {}
    store = TCPStore(environment.main_address, environment.main_port, is_master=False, **options)
    _init_dist_connection(
        environment,
        strategy._get_process_group_backend(),
        store=PrefixStore(f"start_{start}", store),
        **options,
    )
