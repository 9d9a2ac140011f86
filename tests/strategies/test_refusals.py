"""What would change the numbers, hang or cannot be cut is refused, and the message says what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from lightning_thd import Packs, THDBatch
from lightning_thd.parallel.mesh import AxisSizes, resolve_sizes
from lightning_thd.strategies import THDDDPStrategy, THDModelParallelStrategy, THDSingleDeviceStrategy
from lightning_thd.strategies.guards import (
    refuse_anomaly_detection,
    refuse_lbfgs,
    refuse_second_context_parallelism,
    refuse_static_graph,
    refuse_unfrozen,
)
from lightning_thd.strategies.pack_cut import set_data_rank
from lightning_thd.strategies.shards import policy_of
from tests.ranks import run_ranks
from tests.strategies.jobs import Job, Layout, data, family_model, make_trainer
from tests.tiny import sequences


def test_sizes_make_up_the_job() -> None:
    assert resolve_sizes(8, context=2, tensor=2) == AxisSizes(data=2, context=2, tensor=2)
    assert [AxisSizes(data=2, context=2).data_rank(rank) for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (
            6,
            {"context": 4},
            "context_parallel_size=4 x tensor_parallel_size=1 does not divide the 6 processes",
        ),
        (8, {"data": 3, "context": 2}, "is 6, but the job has 8 processes. Start 6 processes"),
        (8, {"tensor": 0}, "tensor_parallel_size=0; wanted 1"),
    ],
)
def test_sizes_that_do_not(world: int, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_sizes(world, **sizes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: THDSingleDeviceStrategy("x"), "device='x' is unknown to torch. Pass 'cpu' or 'cuda:0'"),
        (lambda: THDModelParallelStrategy(data_parallel_replicas=0), "replicas=0; wanted 1 or more. Set it"),
        (
            lambda: THDModelParallelStrategy(pipeline_split=[2, 2]),
            r"pipeline_split=\[2, 2\] with pipeline_parallel_size=1: there are no stages. Set",
        ),
        (lambda: THDDDPStrategy(broadcast_data=1), "broadcast_data is a int, 1; wanted bool"),
    ],
)
def test_options_that_cannot_be(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_static_graph_wants_every_backward_pass_synchronised() -> None:
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    model.static_graph = False
    refuse_static_graph(model)
    model.static_graph = True
    with pytest.raises(MisconfigurationException, match="only in the last one. Leave static_graph out"):
        refuse_static_graph(model)


def test_weights_that_are_unfrozen_later() -> None:
    weight = nn.Parameter(torch.ones(2), requires_grad=False)
    refuse_unfrozen([weight])
    weight.requires_grad_(True)
    with pytest.raises(MisconfigurationException, match="unfrozen after DDP wrapped .* Unfreeze them in con"):
        refuse_unfrozen([weight])


def test_anomalies_of_cut_gradients_are_refused() -> None:
    trainer = L.Trainer(detect_anomaly=True, logger=False, accelerator="cpu", enable_checkpointing=False)
    refuse_anomaly_detection(trainer, AxisSizes(data=2))
    with pytest.raises(MisconfigurationException, match="detect_anomaly=True with tensor_parallel_size=2"):
        refuse_anomaly_detection(trainer, AxisSizes(tensor=2))


def test_fp16_scaling_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="'16-mixed' scales the loss.*Use 'bf16-mixed'"):
        policy_of("16-mixed")


def test_an_optimizer_that_decides_by_all_weights() -> None:
    weights = [torch.nn.Parameter(torch.ones(2))]
    refuse_lbfgs([torch.optim.LBFGS(weights)], AxisSizes(data=2, context=2))
    refuse_lbfgs([torch.optim.AdamW(weights)], AxisSizes(tensor=2))
    with pytest.raises(MisconfigurationException, match="LBFGS with tensor_parallel_size=2, .*Set both"):
        refuse_lbfgs([torch.optim.LBFGS(weights)], AxisSizes(tensor=2))


class NotThd(Job):
    def __init__(self) -> None:
        super().__init__()
        self.model.set_attn_implementation("sdpa")


class HandWritten(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise AssertionError("not reached")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class NoAttention(Job):
    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        return self.model.get_input_embeddings()(batch.input_ids).sum()


class Heads(Job):
    """A model with three key-value heads, which two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.model.config.num_key_value_heads = 3


class OwnParameter(Job):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Wrapped(Job):
    def __init__(self) -> None:
        super().__init__()
        self.inner = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return iter(sequences(8))


class PlacedStream(Stream):
    data_rank, data_size = 0, 1


def collate(samples: list[dict[str, Any]]) -> THDBatch:
    return THDBatch.collate(samples, align=Layout(cp=2).align)


def collate_unaligned(samples: list[dict[str, Any]]) -> THDBatch:
    return THDBatch.collate([{"input_ids": [1, 2, 3]}])


def loader(dataset: Any, collate_fn: Any = collate) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=4, collate_fn=collate_fn)


def refusals() -> dict[str, str]:
    """Run jobs that must be refused on every rank; returns the messages."""
    return {case: refused(case) for case in CASES}


def refused(case: str) -> str:
    ddp, mp = Layout(strategy="thd_ddp", cp=2), Layout(tp=2)
    sequence_parallel = Layout(tp=2, options={"sequence_parallel": True})
    jobs: dict[str, Any] = {
        "size": (Layout(strategy="thd_ddp", cp=3), Job, None),
        "heads": (mp, Heads, None),
        "not thd": (ddp, NotThd, None),
        "hand written": (ddp, HandWritten, None),
        "no attention": (ddp, NoAttention, None),
        "torch cp": (ddp, Job, None),
        "own parameter": (Layout(cp=2), OwnParameter, None),
        "iterable": (ddp, Job, loader(Stream())),
        "no pack": (ddp, Job, DataLoader([torch.ones(2)] * 4)),
        "unaligned": (ddp, Job, loader([{}] * 8, collate_unaligned)),
        "slots": (sequence_parallel, Job, loader([{}] * 8, collate_unaligned)),
        "fsdp 1": (mp, Wrapped, None),
        "replicas": (Layout(dp=2, options={"data_parallel_replicas": 3}), Job, None),
        "compiled": (ddp, lambda: torch.compile(Job(), backend="eager"), None),
    }
    layout, module, given = jobs[case]
    trainer = make_trainer(layout, devices=2, gradient_clip_val=None)
    if given is None:
        given = data(Packs(1))
    other: Any = contextlib.nullcontext()
    if case == "torch cp":
        other = context_parallel(
            init_device_mesh("cpu", (2,)), buffers=[torch.zeros(1, 8)], buffer_seq_dims=[1]
        )
    try:
        with other:
            trainer.fit(module(), given)
    except (MisconfigurationException, ValueError) as err:
        return str(err)
    raise AssertionError(f"{case} was not refused")


CASES = {
    "size": "context_parallel_size=3 x tensor_parallel_size=1 does not divide the 2 processes",
    "heads": "num_key_value_heads=3, which 2 tensor-parallel ranks do not divide; wanted",
    "not thd": r"\(Qwen3\w+, 'sdpa'\) sees only the shard of its own rank. Build the model",
    "hand written": r"\(MultiheadAttention, None\) sees only the shard.*call lightning_thd.varlen",
    "no attention": "ran without calling varlen_attention.*batch.cu_seqlens_padded",
    "own parameter": r"holds the parameters \['scale'\] itself.*Move them",
    "iterable": "Stream is iterable and does not say which part.*data_rank and data_size",
    "no pack": "cuts THDBatch, but the dataloader gave.*align=trainer.strategy.alignment",
    "slots": "3 slots over 2 tensor-parallel ranks; sequence_parallel=True wants a multiple of 2.*align=",
    "fsdp 1": r"wrapped in FullyShardedDataParallel \(FSDP1\), which knows no mesh. Give the model as it is",
    "replicas": "data_parallel_replicas=3 does not divide the 2 data-parallel ranks. Set it to the number",
    "compiled": r"torch.compile\(Job\) while 2 ranks share each pack.*self.model.compile\(\)",
    "unaligned": "Sequence 0 has 3 slots.*wants a multiple of 4.*THDBatch.collate",
    # The last one: torch 2.11 keeps it active after the error.
    "torch cp": r"torch's context_parallel\(\) is active.*Leave its context.*start a new process",
}


@pytest.fixture(scope="module")
def messages() -> list[dict[str, str]]:
    return run_ranks(refusals, 2)


@pytest.mark.parametrize("case", CASES)
def test_refused_on_every_rank(case: str, messages: list[dict[str, str]]) -> None:
    for rank in messages:
        assert re.search(CASES[case], rank[case].replace("\n", " ")), rank[case]


def test_accelerate_has_prepared_the_model() -> None:
    big_modeling = pytest.importorskip("accelerate.big_modeling")
    model = family_model("qwen3")
    refuse_second_context_parallelism(model, 2)
    big_modeling._attach_context_parallel_hooks(model)
    with pytest.raises(MisconfigurationException, match=r"without ParallelismConfig\(cp_size, sp_size\)"):
        refuse_second_context_parallelism(model, 2)


def test_attention_is_refused_under_the_newer_way_of_torch() -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    refuse_second_context_parallelism(None, 2)
    _attention._enable_context_parallel_dispatcher()
    try:
        with pytest.raises(MisconfigurationException, match=r"torch's context_parallel\(\) is active"):
            refuse_second_context_parallelism(None, 2)
    finally:
        _attention._disable_context_parallel_dispatcher()
    refuse_second_context_parallelism(None, 2)


def test_iterable_data_is_given_its_part() -> None:
    dataset = PlacedStream()
    set_data_rank(loader(dataset), 1, AxisSizes(data=2, context=2))
    assert (dataset.data_rank, dataset.data_size) == (1, 2)


class OneReader(L.LightningDataModule):
    """A data module that gives data to the first rank of each pair alone, in batches of unequal size."""

    def train_dataloader(self) -> DataLoader[Any]:
        if torch.distributed.get_rank() % 2:
            return DataLoader([0] * 6, collate_fn=self.forbidden)
        samples = sequences(18, longest=24)
        samples[7] = {"input_ids": [3] * 20_000}  # a message beyond the first buffer
        return DataLoader(samples, batch_size=3, collate_fn=collate)

    def forbidden(self, _: Any) -> None:
        raise AssertionError("this rank must not read")


class Recorder(Job):
    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        self.losses.append(float(batch.stats.real_tokens))
        batch.layout.used = True  # this one has no need of other ranks
        return self.model.lm_head.weight.sum() * 0.0


def one_reader() -> list[float]:
    layout = Layout(
        strategy="thd_ddp", cp=2, options={"broadcast_data": True, "find_unused_parameters": True}
    )
    module = Recorder()
    trainer = make_trainer(
        layout, gradient_clip_val=None, max_steps=-1, max_epochs=1, use_distributed_sampler=False
    )
    trainer.fit(module, OneReader())
    return module.losses[::2]


def test_one_rank_reads_for_its_peers() -> None:
    first, second = run_ranks(one_reader, 2)
    samples = sequences(18, longest=24)
    lengths = [20_000 if i == 7 else len(s["input_ids"]) for i, s in enumerate(samples)]
    assert first == second == [sum(lengths[i : i + 3]) for i in range(0, 18, 3)]
