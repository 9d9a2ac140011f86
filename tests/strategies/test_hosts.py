"""The mixin on strategies of Lightning's own gives the numbers of one process."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import strategies as hosts
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, IterableDataset

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule, THDModelParallelStrategy
from lightning_thd.callbacks import THDThroughputMonitor
from lightning_thd.callbacks.cuda_graph import CUDAGraphCallback
from lightning_thd.cuda_graph.recording import RecordingBackend
from lightning_thd.integrations.fabric import prepare_fabric
from lightning_thd.strategies.mixin import THDStrategyMixin
from tests.cuda_graph.support import GraphModule
from tests.ranks import run_ranks
from tests.strategies.jobs import CLIP, Job, Layout, data, full_parameters, make_trainer, train_by_hand
from tests.tiny import largest_error, quiet_trainer, sequences

STEP = Sequences(12)
# What FSDP calls: since torch 2.13 under a new name.
REDUCE = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class OnDDP(THDStrategyMixin, hosts.DDPStrategy):
    context_parallel_size = 2


class OnOneDevice(THDStrategyMixin, hosts.SingleDeviceStrategy):
    """Lightning's constructor wants the device."""


class OnFSDP(THDStrategyMixin, hosts.FSDPStrategy):
    """Shards by FSDP1."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        # Lightning names the device by its index, of which a CPU has none.
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


class OnFSDPWithContext(OnFSDP):
    context_parallel_size = 2


class WithContext(THDStrategyMixin, hosts.ModelParallelStrategy):
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
    if isinstance(strategy, hosts.FSDPStrategy):  # only the wrapper knows the norm of all shards
        running.configure_gradient_clipping = lambda *_, **__: trainer.model.clip_grad_norm_(CLIP)
    trainer.fit(running, data(STEP))
    whole: Any = contextlib.nullcontext()
    if isinstance(strategy, hosts.FSDPStrategy):
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


def alone() -> list[Any]:
    module, pack = Job(), THDBatch.collate(sequences(3, labels=True))
    make_trainer(Layout(strategy="thd_ddp", dp=2), max_steps=1).fit(module, data(STEP))
    graphs = CUDAGraphCallback(max_sequences=(7, 14), backend="recording", require=True)
    alone = quiet_trainer(devices=1, max_steps=2 + 3 * dist.get_rank(), callbacks=[graphs])
    alone.fit(GraphModule(), data(Packs(1)))  # graphs vote in the first calls, of which one rank has more
    if dist.get_rank():
        return []
    loader = DataLoader([pack], batch_size=None)  # type: ignore[arg-type, list-item]
    how: Any = {"devices": 1, "callbacks": [THDThroughputMonitor()]}
    stream = THDDataModule(lambda: iter(sequences(9)), capacity=99)
    stream.trainer = quiet_trainer(devices=1)
    stream.setup("fit")
    assert next(iter(stream.train_dataloader())).lengths
    found = [quiet_trainer(strategy=s, **how).validate(module, loader) for s in ("auto", "thd")]
    fabric, optimizer = Fabric(accelerator="cpu", devices=1), torch.optim.SGD(module.parameters())
    loop = prepare_fabric(fabric, module.model, data(STEP), optimizer)
    loop.capture(backend=RecordingBackend(), max_sequences=12, require=True)
    loop.backward(next(iter(loop.loader)))
    return [*found, [loop.evaluate([pack])]] if loop.state_dict() else []


def test_one_rank_reads_a_stream_and_evaluates_after_a_job_of_two() -> None:
    plain, ours, loop = run_ranks(alone, 2, timeout_s=60.0)[0]
    assert plain == ours
    assert 0.0 < loop[0]["val/loss"] == pytest.approx(plain[0]["val/loss"])


class Parts(IterableDataset[dict[str, Any]]):
    """Gives the part of the data that the strategy sets; the second rank of each pair may be forbidden to."""

    data_rank, data_size = 0, 1

    def __init__(self, one_reads: bool) -> None:
        self.one_reads = one_reads

    def __iter__(self) -> Iterator[dict[str, Any]]:
        assert not (self.one_reads and dist.get_rank() % 2), "this rank must not read"
        return iter(samples_of_parts()[self.data_rank :: self.data_size])


def samples_of_parts() -> list[dict[str, Any]]:
    samples = sequences(36, longest=24)
    samples[7] = {"input_ids": [3] * 20_000}  # a message beyond the first buffer
    return samples


class Recorder(Job):
    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        self.losses.append(float(batch.stats.real_tokens))
        batch.boundaries.layout.used = True  # this one has no need of other ranks
        return self.model.lm_head.weight.sum() * 0.0


def parts() -> list[list[float]]:
    found = []
    for one_reads in (True, False):
        options = {"broadcast_data": one_reads, "find_unused_parameters": True}
        layout, module = Layout(strategy="thd_ddp", dp=2, cp=2, options=options), Recorder()
        trainer = make_trainer(layout, gradient_clip_val=None, max_steps=-1, max_epochs=1)
        collate = partial(THDBatch.collate, align=layout.align)
        trainer.fit(module, DataLoader(Parts(one_reads), batch_size=3, collate_fn=collate))
        found.append(module.losses[::2])
    return found


def test_each_pair_of_ranks_reads_its_part_of_an_iterable() -> None:
    lengths = [len(sample["input_ids"]) for sample in samples_of_parts()]
    for rank, found in enumerate(run_ranks(parts, 4)):
        own = lengths[rank // 2 :: 2]
        assert found == [[sum(own[i : i + 3]) for i in range(0, 18, 3)]] * 2
