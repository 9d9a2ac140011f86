"""The mixin on strategies of Lightning's own gives the numbers of one process."""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from lightning_thd import Packs, Sequences, THDBatch, THDModelParallelStrategy, THDStrategyMixin
from tests.ranks import run_ranks
from tests.strategies.jobs import CLIP, Job, Layout, data, full_parameters, make_trainer, train_by_hand
from tests.tiny import largest_error, sequences

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
        # Lightning names the device by its index, of which a CPU has none.
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


class OnFSDPWithContext(OnFSDP):
    context_parallel_size = 2


class WithContext(THDStrategyMixin, ModelParallelStrategy):
    context_parallel_size = 2


class ByAttributes(WithContext):
    tensor_parallel_size = 2


class ShardsItself(Job):
    """Applies FSDP2 over a named axis of the strategy's mesh, as Lightning's documentation does."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_context_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh).set_force_sum_reduction_for_comms(True)


class Configured(Job):
    def configure_model(self) -> None:
        """Lightning's ModelParallelStrategy asks for one."""


JOBS: dict[str, tuple[Any, type[Job], Layout]] = {
    "ddp": (OnDDP, Job, Layout(cp=2)),
    "one device": (lambda: OnOneDevice(device=torch.device("cpu")), Job, Layout()),
    "fsdp": (OnFSDP, Job, Layout(dp=2)),
    "fsdp cp": (OnFSDPWithContext, Job, Layout(cp=2)),
    "cp": (WithContext, ShardsItself, Layout(cp=2)),
    "attributes": (ByAttributes, Configured, Layout(cp=2, tp=2)),
}


def job(name: str) -> tuple[dict[str, torch.Tensor], tuple[int, int]]:
    torch.manual_seed(torch.distributed.get_rank())
    make, module, layout = JOBS[name]
    running, strategy = module(), make()
    trainer = make_trainer(layout, strategy=strategy)
    if isinstance(strategy, FSDPStrategy):  # only the wrapper knows the norm of all shards
        running.configure_gradient_clipping = lambda *_, **__: trainer.model.clip_grad_norm_(CLIP)
    trainer.fit(running, data(STEP))
    whole: Any = contextlib.nullcontext()
    if isinstance(strategy, FSDPStrategy):
        whole = FullyShardedDataParallel.summon_full_params(trainer.model)
    with whole:
        params = full_parameters(running.model)
    found = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in params.items()}
    return found, (strategy.data_rank, strategy.data_size)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "cp" else pytest.mark.slow) for name in JOBS]
)
def test_any_host_trains_as_one_process(name: str) -> None:
    layout = JOBS[name][2]
    wanted = train_by_hand("qwen3", layout, STEP)
    for rank, (params, place) in enumerate(run_ranks(job, layout.world, name)):
        # Lightning makes a model under FSDP1 fp32.
        assert largest_error(params, wanted["params"]) < (1e-5 if "fsdp" in name else 1e-10)
        assert place == (rank // (layout.cp * layout.tp), layout.dp)


# Under FSDP2 a step has three reductions: of two layers, and of the rest of the model.
SYNCS: dict[str, tuple[Any, int, Packs | Sequences]] = {
    "fsdp packs": (OnFSDP, 1, Packs(6)),
    "ours packs": (THDModelParallelStrategy, 3, Packs(6)),
    "ours": (THDModelParallelStrategy, 3, Sequences(24)),
    "keeps": (partial(THDModelParallelStrategy, reshard_after_forward=False), 3, Sequences(24)),
}


def collectives() -> dict[str, tuple[int, int, int, dict[str, torch.Tensor]]]:
    """Count the collectives that reduce gradients and gather weights in two steps, and the microbatches."""
    calls, found = Counter[str](), {}

    def counted(kind: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        calls[kind] += 1
        return call(*args, **kwargs)

    for name, (make, _, step) in SYNCS.items():
        running = Job()
        accumulate = step.n // 2 if isinstance(step, Packs) else 1
        options = {"gradient_clip_val": None, "max_steps": 2, "accumulate_grad_batches": accumulate}
        trainer = make_trainer(Layout(dp=2), strategy=make(), **options)
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            for kind in (REDUCE, GATHER):
                patch.setattr(dist, kind, partial(counted, kind, getattr(dist, kind)))
            trainer.fit(running, data(step))
        counts = calls[REDUCE], calls[GATHER], running.microbatches
        found[name] = (*counts, {} if name.startswith("fsdp") else full_parameters(running.model))
    return found


def test_gradients_are_reduced_and_kept_weights_gathered_once_a_step() -> None:
    for found in run_ranks(collectives, 2):
        for name, (reductions, _, microbatches, _) in found.items():
            assert reductions == 2 * SYNCS[name][1]
            assert microbatches >= 2 * 2
        (_, often, microbatches, wanted), (_, once, _, kept) = found["ours"], found["keeps"]
        assert once == 2 * 3
        assert often > microbatches * 3
        assert largest_error(kept, wanted) == 0.0


class OneReader(L.LightningDataModule):
    """A data module that gives data to the first rank of each pair alone, in batches of unequal size."""

    def train_dataloader(self) -> DataLoader[Any]:
        if torch.distributed.get_rank() % 2:
            return DataLoader([0] * 6, collate_fn=self.forbidden)
        samples = sequences(18, longest=24)
        samples[7] = {"input_ids": [3] * 20_000}  # a message beyond the first buffer
        return DataLoader(
            samples, batch_size=3, collate_fn=partial(THDBatch.collate, align=Layout(cp=2).align)
        )

    def forbidden(self, _: Any) -> None:
        raise AssertionError("this rank must not read")


class Recorder(Job):
    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        self.losses.append(float(batch.stats.real_tokens))
        batch.layout.used = True  # this one has no need of other ranks
        return self.model.lm_head.weight.sum() * 0.0


def one_reader() -> list[float]:
    options = {"broadcast_data": True, "find_unused_parameters": True}
    module = Recorder()
    trainer = make_trainer(
        Layout(strategy="thd_ddp", cp=2, options=options),
        gradient_clip_val=None,
        max_steps=-1,
        max_epochs=1,
        use_distributed_sampler=False,
    )
    trainer.fit(module, OneReader())
    return module.losses[::2]


def test_one_rank_reads_for_its_peers() -> None:
    first, second = run_ranks(one_reader, 2)
    samples = sequences(18, longest=24)
    lengths = [20_000 if i == 7 else len(s["input_ids"]) for i, s in enumerate(samples)]
    assert first == second == [sum(lengths[i : i + 3]) for i in range(0, 18, 3)]
