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
    """Train under a strategy; return the whole weights, and the rank's place among those that read data."""
    torch.manual_seed(torch.distributed.get_rank())
    make_strategy, module_class, layout = JOBS[name]
    module = module_class()
    strategy = make_strategy()
    is_fsdp1 = isinstance(strategy, hosts.FSDPStrategy)
    trainer = make_trainer(layout, strategy=strategy)
    if is_fsdp1:  # only the wrapper knows the norm of all shards
        module.configure_gradient_clipping = lambda *_, **__: trainer.model.clip_grad_norm_(CLIP)
    trainer.fit(module, data(STEP))

    gathered: Any = contextlib.nullcontext()
    if is_fsdp1:
        gathered = FullyShardedDataParallel.summon_full_params(trainer.model)
    with gathered:
        params = full_parameters(module.model)
    plain = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in params.items()}
    return plain, (strategy.data_rank, strategy.data_size)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "cp" else pytest.mark.slow) for name in JOBS]
)
def test_any_host_trains_as_one_process(name: str) -> None:
    """Weights after training are those of a loop in one process, and ranks read the data of their place."""
    _, _, layout = JOBS[name]
    by_hand = train_by_hand("qwen3", layout, STEP)
    tolerance = 1e-5 if "fsdp" in name else 1e-10  # Lightning makes a model under FSDP1 fp32
    for rank, (params, place) in enumerate(run_ranks(job, layout.world, name)):
        assert largest_error(params, by_hand["params"]) < tolerance
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
    calls = Counter[str]()
    results = {}

    def counted(kind: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        calls[kind] += 1
        return call(*args, **kwargs)

    for name, (make_strategy, _, step) in SYNCS.items():
        module = Job()
        trainer = make_trainer(
            Layout(dp=2),
            strategy=make_strategy(),
            gradient_clip_val=None,
            max_steps=2,
            accumulate_grad_batches=step.n // 2 if isinstance(step, Packs) else 1,
        )
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            for kind in (REDUCE, GATHER):
                patch.setattr(dist, kind, partial(counted, kind, getattr(dist, kind)))
            trainer.fit(module, data(step))
        params = {} if name.startswith("fsdp") else full_parameters(module.model)
        results[name] = calls[REDUCE], calls[GATHER], module.microbatches, params
    return results


def test_gradients_are_reduced_and_kept_weights_gathered_once_a_step() -> None:
    """Microbatches share one reduction; weights are gathered for each, or once if they are kept."""
    for results in run_ranks(collectives, 2):
        for name, (reductions, _, microbatches, _) in results.items():
            _, reductions_per_step, _ = SYNCS[name]
            assert reductions == 2 * reductions_per_step, name
            assert microbatches >= 2 * 2, name

        _, gathers, microbatches, params = results["ours"]
        assert gathers > microbatches * 3
        _, gathers, _, params_of_kept = results["keeps"]
        assert gathers == 2 * 3
        assert largest_error(params_of_kept, params) == 0.0


def alone() -> list[Any]:
    """Train on two ranks; then rank 0 evaluates by two strategies and a loop, with one device each."""
    module = Job()
    make_trainer(Layout(strategy="thd_ddp", dp=2), max_steps=1).fit(module, data(STEP))
    graphs = CUDAGraphCallback(max_sequences=(7, 14), backend="recording", require=True)
    # Graphs vote in the first calls, of which one rank has more.
    trainer = quiet_trainer(devices=1, max_steps=2 + 3 * dist.get_rank(), callbacks=[graphs])
    trainer.fit(GraphModule(), data(Packs(1)))
    if dist.get_rank():
        return []

    stream = THDDataModule(lambda: iter(sequences(9)), capacity=99)
    stream.trainer = quiet_trainer(devices=1)
    stream.setup("fit")
    assert next(iter(stream.train_dataloader())).lengths

    pack = THDBatch.collate(sequences(3, labels=True))
    loader = DataLoader([pack], batch_size=None)  # type: ignore[arg-type, list-item]
    results: list[Any] = []
    for strategy in ("auto", "thd"):
        trainer = quiet_trainer(strategy=strategy, devices=1, callbacks=[THDThroughputMonitor()])
        results.append(trainer.validate(module, loader))

    fabric = Fabric(accelerator="cpu", devices=1)
    loop = prepare_fabric(fabric, module.model, data(STEP), torch.optim.SGD(module.parameters()))
    loop.capture(backend=RecordingBackend(), max_sequences=12, require=True)
    loop.backward(next(iter(loop.loader)))
    assert loop.state_dict()
    return [*results, [loop.evaluate([pack])]]


def test_one_rank_reads_a_stream_and_evaluates_after_a_job_of_two() -> None:
    """Nothing that one rank does by itself waits for the other rank of an earlier job."""
    plain, ours, of_loop = run_ranks(alone, 2, timeout_s=60.0)[0]
    assert plain == ours
    assert 0.0 < of_loop[0]["val/loss"] == pytest.approx(plain[0]["val/loss"])


class Parts(IterableDataset[dict[str, Any]]):
    """Gives the part of the data that the strategy sets; the second rank of each pair may be forbidden to."""

    data_rank = 0
    data_size = 1

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
    """Return the tokens of each batch that a rank got: if one rank of a pair reads, and if both do."""
    results = []
    for one_reads in (True, False):
        options = {"broadcast_data": one_reads, "find_unused_parameters": True}
        layout = Layout(strategy="thd_ddp", dp=2, cp=2, options=options)
        module = Recorder()
        trainer = make_trainer(layout, gradient_clip_val=None, max_steps=-1, max_epochs=1)
        collate = partial(THDBatch.collate, align=layout.align)
        trainer.fit(module, DataLoader(Parts(one_reads), batch_size=3, collate_fn=collate))
        results.append(module.losses[::2])
    return results


def test_each_pair_of_ranks_reads_its_part_of_an_iterable() -> None:
    """Both ranks of a pair get the batches of their part, also if only one of them reads."""
    lengths = [len(sample["input_ids"]) for sample in samples_of_parts()]
    for rank, tokens in enumerate(run_ranks(parts, 4)):
        of_part = lengths[rank // 2 :: 2]
        expected = [sum(of_part[i : i + 3]) for i in range(0, 18, 3)]
        assert tokens == [expected, expected]
