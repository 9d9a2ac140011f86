"""FP8 in every host and on several ranks: the same losses, the same weights, and packs every kernel takes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_thd import Packs, THDDataModule, THDModelParallelStrategy
from lightning_thd.precision import FP8Precision, convert_linear
from tests.integrations.engines import ENGINES as HOSTS
from tests.integrations.engines import Job
from tests.precision.runs import DATA, Module, fit, llama
from tests.ranks import run_ranks
from tests.tiny import largest_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao", "ignore::UserWarning:torchao")
CAPACITY = 250
STEPS = 4


def converted() -> nn.Module:
    """A tied Llama in fp32 whose layers multiply in emulated FP8; its sums have one order on one thread."""
    torch.set_num_threads(1)
    model = llama()
    convert_linear(model, recipe="tensorwise", engine="torchao", emulate=True)
    return model


def job_of(make: Any) -> Job:
    return Job(make, DATA, capacity=CAPACITY, step=Packs(2), accumulate=2, steps=STEPS)


def train_in(host: str) -> tuple[dict[str, Tensor], list[float], list[int]]:
    """Train in one host, and collect the slots of every pack."""
    slots: list[int] = []

    def make() -> Any:
        model: Any = converted()
        layer = model.model.layers[0].mlp.up_proj
        layer.register_forward_pre_hook(lambda _, args: slots.append(args[0].shape[:-1].numel()))
        return model

    return (*job_of(make).run(host), slots)


@pytest.mark.filterwarnings("ignore")  # the hosts' own
def test_the_four_hosts_train_the_same_model_on_aligned_packs() -> None:
    """Against a loop by hand over the same packs; unconverted, the model ends elsewhere."""
    by_host = {host: train_in(host) for host in HOSTS}
    expected, losses, slots = by_host["lightning"]
    assert len(losses) == STEPS
    assert len(slots) == 2 * STEPS
    for host in HOSTS[1:]:
        assert by_host[host][2] == slots, host
        assert largest_error(by_host[host][0], expected) < 1e-6, host  # fp32; the hosts divide by two apart
        assert by_host[host][1] == pytest.approx(losses, rel=1e-6), host
    assert all(count % 16 == 0 for count in slots)
    other, _ = job_of(llama).run("lightning")
    assert largest_error(other, expected) > 1e-5


def by_ranks(kind: str) -> tuple[list[float], list[int]]:
    """Train two packs a step on the ranks there are, and return the losses of this rank."""
    torch.set_num_threads(1)
    module = Module(llama(tie_word_embeddings=False))
    strategy = THDModelParallelStrategy() if kind == "fsdp" else kind
    settings: dict[str, Any] = {"strategy": strategy, "devices": 2}
    if kind == "one process":
        settings = {"accumulate_grad_batches": 2}
    data = THDDataModule(DATA, capacity=CAPACITY, global_batch=Packs(2))
    plugin = FP8Precision("rowwise", engine="torchao", emulate=True, weights_dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        fit(Path(folder), module, plugin, steps=STEPS, data=data, **settings)
    return module.losses, module.slots


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ddp_and_fsdp_equal_one_process() -> None:
    """Scales are of the numbers a rank multiplies: two ranks of a pack are one of two microbatches."""
    [(alone, slots)] = run_ranks(by_ranks, 1, "one process")
    for kind in ("ddp", "fsdp"):
        ranks = run_ranks(by_ranks, 2, kind)
        assert [loss for pair in zip(*(losses for losses, _ in ranks), strict=True) for loss in pair] == (
            pytest.approx(alone, rel=2e-6)
        ), kind
        assert sorted(count for _, counts in ranks for count in counts) == sorted(slots)
        assert all(count % 16 == 0 for count in slots)
