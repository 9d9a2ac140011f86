"""The mixin on strategies of Lightning's own: the numbers of one process, or a refusal."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    XLAStrategy,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from lightning_thd import Packs, Sequences, THDModelParallelStrategy, THDStrategyMixin
from lightning_thd.parallel.tensor import apply_tensor_parallel, model_plan
from tests.ranks import run_ranks
from tests.rows import run_row
from tests.strategies.jobs import CLIP, Job, Layout, data, full_parameters, make_trainer, train_by_hand
from tests.tiny import largest_error

STEP = Sequences(12)
# What FSDP calls: since torch 2.13 under a new name.
REDUCE = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class OnDDP(THDStrategyMixin, DDPStrategy):
    context_parallel_size = 2


class OnOneDevice(THDStrategyMixin, SingleDeviceStrategy):
    """Lightning's constructor wants the device."""


class OnFSDP(THDStrategyMixin, FSDPStrategy):
    """Shards by FSDP1."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self.root_device.type != "cpu":
            return super()._setup_model(model)
        # Lightning names the device by its index, of which a CPU has none.
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


class OnModelParallel(THDStrategyMixin, ModelParallelStrategy):
    """Shards by FSDP2 over all ranks."""


class ByAttributes(THDStrategyMixin, ModelParallelStrategy):
    context_parallel_size = 2
    tensor_parallel_size = 2


class WithContext(OnModelParallel):
    context_parallel_size = 2


class WithTensor(OnDDP):
    context_parallel_size = 1
    tensor_parallel_size = 2


class ShardsItself(Job):
    """Applies FSDP2 over a named axis of the strategy's mesh, as Lightning's documentation does."""

    axis = "data_parallel"

    def configure_model(self) -> None:
        mesh = self.device_mesh[self.axis]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh).set_force_sum_reduction_for_comms(True)


class ShardsOverAll(ShardsItself):
    axis = "data_context_parallel"


class ShardsPart(ShardsItself):
    """Leaves the embedding, the last norm and the head whole."""

    def configure_model(self) -> None:
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.device_mesh[self.axis])


class ShardsTensor(Job):
    """Applies tensor parallelism alone."""

    def configure_model(self) -> None:
        apply_tensor_parallel(self.model, model_plan(self.model), self.device_mesh["tensor_parallel"])


class Configured(Job):
    def configure_model(self) -> None:
        """Lightning's ModelParallelStrategy asks for one."""


def strategy_of(name: str) -> Strategy:
    made: dict[str, Any] = {
        "ddp": lambda: OnDDP(),
        "one device": lambda: OnOneDevice(device=torch.device("cpu")),
        "fsdp": lambda: OnFSDP(),
        "fsdp cp": lambda: type("WithContext", (OnFSDP,), {"context_parallel_size": 2})(),
        "dp": lambda: OnModelParallel(),
        "attributes": lambda: ByAttributes(),
        "cp": lambda: WithContext(),
        "file": lambda: OnModelParallel(save_distributed_checkpoint=False),
        "arguments": lambda: WithContext(data_parallel_size=1, tensor_parallel_size=2),
        "ours": lambda: THDModelParallelStrategy(),
        "keeps": lambda: THDModelParallelStrategy(reshard_after_forward=False),
        "tp ddp": lambda: WithTensor(),
        "replicas": lambda: type("WithReplicas", (OnDDP,), {"data_parallel_replicas": 2})(),
    }
    strategy: Strategy = made[name]()
    return strategy


def job(name: str, module: type[Job], world: int) -> dict[str, Any]:
    torch.manual_seed(torch.distributed.get_rank())
    running, strategy = module(), strategy_of(name)
    trainer = make_trainer(Layout(dp=world), strategy=strategy, **({"devices": 1} if world == 1 else {}))
    if isinstance(strategy, FSDPStrategy):  # only the wrapper knows the norm of all shards
        running.configure_gradient_clipping = lambda *_, **__: trainer.model.clip_grad_norm_(CLIP)
    trainer.fit(running, data(STEP))
    assert strategy.data_size * strategy.sizes.peers == world
    model: Any = running.model
    whole: Any = contextlib.nullcontext()
    if isinstance(strategy, FSDPStrategy):
        whole = FullyShardedDataParallel.summon_full_params(trainer.model)
    with whole:
        params = full_parameters(model)
    return {
        "params": {n.replace("_fsdp_wrapped_module.", ""): p for n, p in params.items()},
        "losses": running.losses,
        "data": (strategy.data_rank, strategy.data_size),
    }


JOBS = {
    "ddp": (Job, Layout(cp=2)),
    "one device": (Job, Layout()),
    "fsdp": (Job, Layout(dp=2)),
    "fsdp cp": (Job, Layout(cp=2)),
    "cp": (ShardsOverAll, Layout(cp=2)),
    "attributes": (Configured, Layout(cp=2, tp=2)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "cp" else pytest.mark.slow) for name in JOBS]
)
def test_any_host_trains_as_one_process(name: str) -> None:
    module, layout = JOBS[name]
    wanted = train_by_hand("qwen3", layout, STEP)
    for rank, found in enumerate(run_ranks(job, layout.world, name, module, layout.world)):
        # Lightning makes a model under FSDP1 fp32.
        assert largest_error(found["params"], wanted["params"]) < (1e-5 if "fsdp" in name else 1e-10)
        assert found["data"] == (rank // (layout.cp * layout.tp), layout.dp)


@pytest.mark.gpu
def test_fsdp_on_a_gpu_trains_as_one_process() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: FSDP1 in Lightning's own way names it by index")
    strategy, module = OnFSDP(), Job(dtype=torch.float32)
    trainer = make_trainer(Layout(), strategy=strategy, accelerator="gpu", devices=1, gradient_clip_val=None)
    module.configure_gradient_clipping = lambda *_, **__: trainer.model.clip_grad_norm_(CLIP)
    trainer.fit(module, data(STEP))
    wanted = train_by_hand("qwen3", Layout(), STEP, torch.float32)
    with FullyShardedDataParallel.summon_full_params(trainer.model):
        params = {n: p.cpu() for n, p in full_parameters(module.model).items()}
    found = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in params.items()}
    assert largest_error(found, wanted["params"]) < 1e-4  # other kernels, fp32


def refused(name: str, world: int) -> str:
    module = {"dp cp axis": ShardsItself, "part": ShardsPart, "tp alone": ShardsTensor}.get(name, Configured)
    found = {"dp cp axis": "cp", "part": "dp", "tp alone": "dp"}.get(name, name)
    trainer = make_trainer(Layout(dp=world), strategy=strategy_of(found))
    try:
        trainer.fit(module(), data(STEP))
    except MisconfigurationException as err:
        return str(err)
    raise AssertionError(f"{name} was not refused")


REFUSALS = {
    "replicas": "data_parallel_replicas=2 under WithReplicas, which does not share weights out",
    "arguments": "WithContext was given sizes as arguments .* Set the attributes data_parallel_size",
    "file": "save_distributed_checkpoint=False under OnModelParallel, whose checkpoints are folders",
    "tp ddp": "tensor_parallel_size=2 under WithTensor, which does not share weights out",
    "dp cp axis": "was sharded over 1 ranks in configure_model.., but 2 ranks see "
    "different.*1 data-parallel x 2 context",
    "part": r"model.model.embed_tokens.weight was sharded over 1 ranks.*Call fully_shard on the whole model",
    "tp alone": "sharded over 1 ranks in configure_model.., but 2 ranks see different tokens",
}


def refusals() -> dict[str, str]:
    return {name: refused(name, 2) for name in REFUSALS}


def test_axes_that_would_change_the_numbers_are_refused() -> None:
    for rank in run_ranks(refusals, 2):
        for name, message in REFUSALS.items():
            assert re.search(message, rank[name]), (name, rank[name])


@pytest.mark.parametrize(
    ("host", "why"),
    [(DeepSpeedStrategy, "whose engine accumulates"), (XLAStrategy, "one step of fixed shapes")],
)
def test_hosts_that_run_steps_by_themselves_are_refused(host: type, why: str) -> None:
    with pytest.raises(
        TypeError, match=f"puts THDStrategyMixin on {host.__name__}, .*{why}.*Put it on Single"
    ):
        type("Mine", (THDStrategyMixin, host), {})


SYNCS: dict[str, tuple[type[Job], int, Packs | Sequences]] = {
    "fsdp sequences": (Job, 1, Sequences(24)),
    "fsdp packs": (Job, 1, Packs(6)),
    "dp sequences": (ShardsItself, 3, Sequences(24)),  # two layers, and the rest of the model
    "dp packs": (ShardsItself, 3, Packs(6)),
    "ours sequences": (Job, 3, Sequences(24)),
    "ours packs": (Job, 3, Packs(6)),
    "keeps sequences": (Job, 3, Sequences(24)),
}


def collectives(name: str) -> tuple[int, int, int, dict[str, torch.Tensor]]:
    """Count the collectives that reduce gradients and gather weights in two steps, and the microbatches."""
    module, _, step = SYNCS[name]
    running, calls = module(), Counter[str]()
    accumulate = step.n // 2 if isinstance(step, Packs) else 1
    options = {"gradient_clip_val": None, "max_steps": 2, "accumulate_grad_batches": accumulate}
    trainer = make_trainer(Layout(dp=2), strategy=strategy_of(name.split()[0]), **options)
    with pytest.MonkeyPatch.context() as patch:
        for kind in (REDUCE, GATHER):
            patch.setattr(dist, kind, partial(counted, calls, kind, getattr(dist, kind)))
        trainer.fit(running, data(step))
    params = {} if name.startswith("fsdp") else full_parameters(running.model)
    return calls[REDUCE], calls[GATHER], running.microbatches, params


def counted(calls: Counter[str], kind: str, call: Any, *args: Any, **kwargs: Any) -> Any:
    calls[kind] += 1
    return call(*args, **kwargs)


@pytest.mark.parametrize(
    "names",
    [
        ["fsdp packs", "ours sequences", "keeps sequences"],
        pytest.param(list(SYNCS), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_gradients_are_reduced_and_kept_weights_gathered_once_a_step(names: list[str]) -> None:
    for outcomes in zip(*run_row(collectives, 2, names), strict=True):
        found = {name: outcome.value for name, outcome in zip(names, outcomes, strict=True)}
        for name, (reductions, _, microbatches, _) in found.items():
            assert reductions == 2 * SYNCS[name][1]
            assert microbatches >= 2 * 2
        (_, often, microbatches, wanted), (_, once, _, kept) = (
            found["ours sequences"],
            found["keeps sequences"],
        )
        assert once == 2 * 3
        assert often > microbatches * 3
        assert largest_error(kept, wanted) == 0.0
