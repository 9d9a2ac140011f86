"""What would change the numbers, hang or cannot be cut is refused, and the message says what to do."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, XLAStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.experimental import _attention as torch_attention
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, SumMetric

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule, THDStrategyMixin, causal_lm_loss
from lightning_thd.batch import THDStep
from lightning_thd.parallel.mesh import AxisSizes, resolve_sizes
from lightning_thd.parallel.shard import shard_batch
from lightning_thd.parallel.tensor import apply_tensor_parallel, model_plan
from lightning_thd.strategies import THDDDPStrategy, THDModelParallelStrategy, guards
from lightning_thd.strategies.logs import refuse_sums
from lightning_thd.strategies.norms import grad_norm, refused_norms_of_a_stage
from lightning_thd.strategies.shards import policy_of
from tests.ranks import pretended_ranks, run_ranks
from tests.strategies.jobs import INTERLEAVED, Job, Layout, family_model, make_trainer
from tests.tiny import quiet_trainer, sequences

CONTEXT = Layout(strategy="thd_ddp", cp=2)
REFUSED = (ValueError, TypeError, MisconfigurationException)


def both(**options: Any) -> None:
    """Give options to both strategies; each must refuse them."""
    for kind in (THDDDPStrategy, THDModelParallelStrategy):
        with pytest.raises(REFUSED) as error:
            kind(**options)
    raise error.value


def static_graph() -> None:
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    model.static_graph = True
    guards.refuse_static_graph(model)


def summed(*, dynamic: bool, group: Any = None) -> None:
    module = L.LightningModule()
    module.parts = nn.ModuleDict({"tokens": SumMetric(), "mean": MeanMetric()})
    module.parts["tokens"].process_group = group
    refuse_sums(module, dynamic=dynamic)


def accelerate_hooks() -> None:
    model = family_model("qwen3")
    guards.refuse_second_context_parallelism(model, 2)
    pytest.importorskip("accelerate.big_modeling")._attach_context_parallel_hooks(model)
    guards.refuse_second_context_parallelism(model, 2)


def newer_context_parallel() -> None:
    style = torch_attention._ContextParallel
    module = nn.Sequential(nn.Identity())
    guards.refuse_second_context_parallelism(module, 2)
    mesh: Any = None  # hooks are not called
    style(seq_dim=2, attention_type=style.AttentionType.SDPA)._apply(module[0], mesh)
    guards.refuse_second_context_parallelism(module, 2)


def norm_of_a_stage(norm_of: Callable[[Any], Any]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    with refused_norms_of_a_stage():
        norm_of(parameter)


def two_models() -> None:
    strategy = THDModelParallelStrategy()
    module = L.LightningModule()
    module.first = family_model("qwen3")
    module.second = family_model("qwen3")
    strategy._lightning_module = module
    strategy.save_pretrained("nowhere")


def cut_prefixes(**options: Any) -> None:
    rows = [{"input_ids": [1, 2, 3]}] * 2
    batch = THDBatch.collate(rows, share_prefixes=True, align=Layout(cp=2).align)
    shard_batch(batch, group=None, cp=2, rank=0, **options)


LBFGS = [torch.optim.LBFGS([nn.Parameter(torch.ones(2))])]
CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: THDModelParallelStrategy(data_parallel_replicas=0), "replicas=0; wanted 1 or more. Set it"),
    (
        lambda: THDModelParallelStrategy(pipeline_split=[2, 2]),
        "there are no stages. Set pipeline_parallel_size",
    ),
    (lambda: THDModelParallelStrategy(**INTERLEAVED), "there are no stages. Set pipeline_parallel_size"),
    (lambda: THDModelParallelStrategy(pipeline_schedule="gpipe"), "'gpipe'; wanted one of 1f1b, interleaved"),  # type: ignore[arg-type]
    (lambda: THDModelParallelStrategy(stages_per_rank=2), "'interleaved' takes 2 or more"),
    (lambda: THDModelParallelStrategy(reshard_after_forward="never"), "is a str, 'never'; wanted bool"),  # type: ignore[arg-type]
    (lambda: both(context_parallel_layout="zigzag"), "'zigzag'; wanted one of dual_chunk"),
    (lambda: both(context_parallel_size="dynamic"), "max_context_parallel_size is None; wanted"),
    (lambda: both(context_parallel_size="auto"), "is a str, 'auto'.* Pass a number of ranks, or 'dynamic'"),
    (lambda: both(max_context_parallel_size=4), "belongs to context_parallel_size='dynamic'"),
    (lambda: resolve_sizes(6, context=4), "context_parallel_size=4 x tensor_parallel_size=1 does not divide"),
    (lambda: resolve_sizes(8, data=3, context=2), "is 6, but the job has 8 processes. Start 6 processes"),
    (static_graph, "only in the last one. Leave static_graph out"),
    (lambda: guards.refuse_unfrozen([nn.Parameter(torch.ones(2))]), "unfrozen after DDP wrapped the module"),
    (lambda: guards.refuse_lbfgs(LBFGS, AxisSizes(pipeline=2)), "LBFGS with .*=1, pipeline_.*=2: LBFGS"),
    (lambda: policy_of("16-mixed"), "'16-mixed' would let every rank.*Use 'bf16-mixed'"),
    (lambda: summed(dynamic=False), r"parts\.tokens is a SumMetric while.*strategy\.data_parallel_group for"),
    (lambda: summed(dynamic=True), "no group counts each pack just once"),
    (accelerate_hooks, r"without ParallelismConfig\(cp_size, sp_size\)"),
    (newer_context_parallel, r"torch's context_parallel\(\) is active"),
    (lambda: type("Mine", (THDStrategyMixin, DeepSpeedStrategy), {}), "DeepSpeedStrategy, whose engine"),
    (
        lambda: type("Mine", (THDStrategyMixin, XLAStrategy), {}),
        "one step of fixed shapes. Put it on SingleDevice",
    ),
    (lambda: norm_of_a_stage(lambda p: nn.utils.clip_grad_norm_([p], 1.0)), "only the gradients of this"),
    (lambda: norm_of_a_stage(lambda p: nn.utils.get_total_norm([p.grad])), r"stage(?s:.*)refusals.py:\d+: "),
    (lambda: grad_norm(nn.Linear(2, 2), "nan"), "norm_type='nan'; wanted a number above 0, or 'inf'"),
    (two_models, r"holds 2 models with save_pretrained\(\), wanted one. Pass model="),
    (lambda: cut_prefixes(communication="ulysses"), "='ulysses' with sequences that share.*'all_gather'"),
    (lambda: cut_prefixes(layout="striped"), "='striped' with sequences that share.*or share_prefixes=False"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_a_call(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(REFUSED, match=message):
        call()


def test_what_is_not_refused() -> None:
    guards.refuse_unfrozen([nn.Parameter(torch.ones(2), requires_grad=False)])
    guards.refuse_lbfgs(LBFGS, AxisSizes(data=2, context=2))
    summed(dynamic=False, group=object())


@dataclass(frozen=True)
class Case:
    """A job, and what it is to be told."""

    message: str
    module: Callable[[], Any] = Job
    layout: Layout = CONTEXT
    data: Callable[[], Any] = lambda: planned(Packs(1))()
    strategy: Callable[[], Any] | str | None = None
    accumulate: int = 1
    path: str | None = None

    def fit(self, devices: int = 2) -> None:
        strategy = self.strategy() if callable(self.strategy) else self.strategy
        options = {"devices": devices, "strategy": strategy, "accumulate_grad_batches": self.accumulate}
        trainer = make_trainer(self.layout, gradient_clip_val=None, **options)
        trainer.fit(self.module(), self.data(), ckpt_path=self.path)


def changed(change: Callable[[Any], Any], family: str = "qwen3@4") -> Callable[[], Job]:
    """Return what makes a module after a change to it."""

    def make() -> Job:
        module = Job(family)
        change(module)
        return module

    return make


def stepping(step: Callable[[Any, THDBatch], Any], family: str = "qwen3@4") -> Callable[[], Job]:
    """Return what makes a module with another ``training_step``."""
    return changed(lambda m: setattr(m, "training_step", lambda batch, batch_idx: step(m, batch)), family)


def configured(configure: Callable[[Any], None]) -> Callable[[], Job]:
    """Return what makes a module with a ``configure_model``."""
    return changed(lambda m: setattr(m, "configure_model", lambda: configure(m)), "qwen3")


def shard_layers(module: Any) -> None:
    for layer in module.model.model.layers:
        fully_shard(layer, mesh=module.device_mesh["data_parallel"])


def shard_all(module: Any) -> None:
    shard_layers(module)
    fully_shard(module.model, mesh=module.device_mesh["data_parallel"])


def cut_only(module: Any) -> None:
    apply_tensor_parallel(module.model, model_plan(module.model), module.device_mesh["tensor_parallel"])


def wrapped(module: Any) -> None:
    module.inner = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))


def adapted(module: Any) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    module.model = peft.get_peft_model(module.model, config).double()


def twice(module: Any, batch: THDBatch) -> torch.Tensor:
    return causal_lm_loss(module.model, batch) + causal_lm_loss(module.model, batch)


def logs_a_metric(module: Any, batch: THDBatch) -> torch.Tensor:
    module.log("metric", MeanMetric())
    return causal_lm_loss(module.model, batch)


def logs_its_own(module: Any, batch: THDBatch) -> torch.Tensor:
    if not hasattr(module, "own"):
        module.own = MeanMetric()
    module.own(1.0)
    module.log("own", module.own)
    return causal_lm_loss(module.model, batch)


class Tuples(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> Any:
        return self.layer(hidden, **kwargs), hidden


def with_tuples(module: Any) -> None:
    module.model.model.layers[1] = Tuples(module.model.model.layers[1])


class Own(THDStrategyMixin, ModelParallelStrategy):
    """A user's class on FSDP2; sizes are attributes."""


class OwnDDP(THDStrategyMixin, DDPStrategy):
    """A user's class on DDP; sizes are attributes."""


def own(kind: type, given: Any = None, **attributes: Any) -> Callable[[], Any]:
    return lambda: type("Mine", (kind,), attributes)(**(given or {}))


def dynamic(kind: type = THDDDPStrategy, most: int = 2, **options: Any) -> Callable[[], Any]:
    return lambda: kind(context_parallel_size="dynamic", max_context_parallel_size=most, **options)


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return iter(sequences(8))


def loader(dataset: Any, size: int | None = None) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(dataset, batch_size=size)


def planned(step: Packs | Sequences, **options: Any) -> Callable[[], THDDataModule]:
    return lambda: THDDataModule(sequences(80), **{"capacity": 64, "global_batch": step, **options})


CUT = Layout(tp=2)
SHARDED = Layout(dp=2)
STAGES = Layout(pp=2)
SLOTS = Layout(tp=2, options={"sequence_parallel": True})
THREE = Layout(strategy="thd_ddp", cp=3)
REPLICAS = Layout(dp=2, options={"data_parallel_replicas": 3})
TEN = planned(Sequences(10))
MANY = planned(Sequences(30))
UNALIGNED = loader([THDBatch.collate([{"input_ids": [1, 2, 3]}])] * 4)
ON_RANKS = {
    "size": Case("context_parallel_size=3 x .* does not divide the 2 processes", layout=THREE),
    "heads": Case(
        "num_key_value_heads=3, which 2 tensor-parallel ranks do not divide",
        changed(lambda m: setattr(m.model.config, "num_key_value_heads", 3)),
        CUT,
    ),
    "not thd": Case(
        r"\(Qwen3\w+, 'sdpa'\) sees only the shard of its own rank. Set",
        changed(lambda m: m.model.set_attn_implementation("sdpa")),
    ),
    "hand written": Case(
        r"\(MultiheadAttention, None\) sees only the shard.*call varlen",
        changed(lambda m: m.add_module("attention", nn.MultiheadAttention(8, 2))),
    ),
    "no attention": Case(
        "ran without calling varlen_attention.*batch.boundaries",
        stepping(lambda m, given: m.model.get_input_embeddings()(given["a"].input_ids).sum(), "qwen3"),
        data=loader([{"a": THDBatch.collate([{"input_ids": range(3, 11)}])}] * 4),
    ),
    "own parameter": Case(
        r"holds the parameters \['scale'\] itself.*Move them",
        changed(lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(())))),
        Layout(cp=2),
    ),
    "iterable": Case("Stream is iterable and does not say which part.*data_rank", data=loader(Stream(), 4)),
    "no pack": Case("cuts THDBatch, but the dataloader gave.*align=", data=loader([torch.ones(2)] * 4, 4)),
    "slots": Case("3 slots over 2 .* wants a multiple of 2.*align=", layout=SLOTS, data=UNALIGNED),
    "unaligned": Case("Sequence 0 has 3 slots.*wants a multiple of 4.*THDBatch.collate", data=UNALIGNED),
    "fsdp 1": Case(
        r"wrapped in Fully.* \(FSDP1\), which thd_model_parallel does not support", changed(wrapped), CUT
    ),
    "replicas": Case("data_parallel_replicas=3 does not divide the 2 data-parallel", layout=REPLICAS),
    "compiled": Case(
        r"torch.compile\(Job\) while 2 ranks share each pack.*self.model.compile\(\)",
        lambda: torch.compile(Job(), backend="eager"),
    ),
    "dora": Case("is a DoRA layer", changed(adapted), CUT),
    "another axis": Case(
        "sharded over 1 ranks in configure_model.., but 2 ranks see different",
        configured(shard_all),
        strategy=own(Own, context_parallel_size=2),
    ),
    "part": Case(
        "embed_tokens.weight was sharded over 1 ranks", configured(shard_layers), SHARDED, TEN, own(Own)
    ),
    "cut only": Case("over 1 ranks in .*2 ranks see different", configured(cut_only), SHARDED, TEN, own(Own)),
    "whole weights": Case(
        "tensor_parallel_size=2 under Mine, which keeps all weights on every rank",
        strategy=own(OwnDDP, tensor_parallel_size=2),
    ),
    "arguments": Case(
        "Mine was given sizes as arguments .* Set the attributes data_parallel_size",
        strategy=own(Own, {"data_parallel_size": 1, "tensor_parallel_size": 2}),
    ),
    "one file": Case(
        "save_distributed_checkpoint=False under Mine, whose checkpoints are folders",
        configured(lambda m: None),
        data=TEN,
        strategy=own(Own, {"save_distributed_checkpoint": False}),
    ),
    "behind": Case(
        "asynchronous_checkpoints=True under Mine, which writes one file",
        data=TEN,
        strategy=own(THDDDPStrategy, asynchronous_checkpoints=True),
    ),
    "clips": Case(
        "sees only the gradients of this pipeline stage",
        changed(
            lambda m: setattr(
                m,
                "configure_gradient_clipping",
                lambda *_, **__: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
            )
        ),
        STAGES,
        TEN,
    ),
    "degrees of packs": Case("='dynamic' or", data=planned(Packs(2)), strategy=dynamic(), accumulate=2),
    "tiling": Case(
        "ranks=4 does not|=4 does not divide the 2 ranks.*size=2", data=TEN, strategy=dynamic(most=4)
    ),
    "degrees and own packs": Case(
        "'dynamic' cannot be used with oversize='own_pack'",
        data=planned(Sequences(10), oversize="own_pack"),
        strategy=dynamic(),
    ),
    "degrees of a loader": Case(
        "microbatch, but the dataloader gave THDBatch", data=UNALIGNED, strategy=dynamic()
    ),
    "torch cp": Case(r"torch's context_parallel\(\) is active.*Leave its context"),
}


def refusals() -> dict[str, str]:
    """Run jobs that must be refused on every rank; returns the messages."""
    messages = {}
    for name, case in ON_RANKS.items():
        other: Any = contextlib.nullcontext()
        if name == "torch cp":  # the last one: torch 2.11 keeps it active after the error
            mesh = init_device_mesh("cpu", (2,))
            other = context_parallel(mesh, buffers=[torch.zeros(1, 8)], buffer_seq_dims=[1])
        try:
            with other:
                case.fit()
        except REFUSED as err:
            messages[name] = str(err)
    return messages


def test_jobs_that_every_rank_refuses() -> None:
    said = [{name: text.replace("\n", " ") for name, text in rank.items()} for rank in run_ranks(refusals, 2)]
    expected = [(name, rank[name], case.message) for rank in said for name, case in ON_RANKS.items()]
    assert [(name, text) for name, text, message in expected if not re.search(message, text)] == []


OF_STAGES = {
    "manual": Case(
        "which automatic_optimization=False cannot",
        changed(lambda m: setattr(m, "automatic_optimization", False)),
    ),
    "twice": Case("training_step computed 2 losses of the model for a microbatch", stepping(twice)),
    "nothing": Case(
        "computed 0 losses of the model", stepping(lambda *_: torch.zeros((), requires_grad=True))
    ),
    "logits": Case(
        r"Only the last pipeline stage has logits.*\n  test_refusals.py:\d+: stepping\(",
        stepping(lambda m, batch: m.model(**batch.hf_kwargs()).logits.square().mean()),
    ),
    "metric": Case(
        r"self.log\('metric', MeanMetric\) in training_step: only the last pipeline stage has the numbers",
        stepping(logs_a_metric),
    ),
    "beside": Case(
        r"trains \['gate.weight', 'gate.bias'\] beside the Qwen3ForCausalLM",
        changed(lambda m: m.add_module("gate", nn.Linear(1, 1))),
    ),
    "accumulated": Case("accumulate_grad_batches=2, but a pipeline runs all", data=UNALIGNED, accumulate=2),
    "no batch": Case("the dataloader gave dict. Use THD", data=loader([{"input_ids": torch.ones(1, 4)}] * 4)),
    "pairs": Case("Tuples returns a tuple of Tensor, Tensor; wanted only the hidden", changed(with_tuples)),
    "degrees": Case(
        "='dynamic' with pipeline_parallel_size",
        strategy=dynamic(THDModelParallelStrategy, pipeline_parallel_size=2),
    ),
    "a file": Case("is not a checkpoint folder, and a pipeline loads only folders", path="file.ckpt"),
}


@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`|.*does not have many workers")
@pytest.mark.parametrize("name", OF_STAGES)
def test_jobs_of_stages(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({}, "file.ckpt")
    case = replace(OF_STAGES[name], layout=STAGES)
    with pretended_ranks(4 if name == "degrees" else 2), pytest.raises(REFUSED, match=case.message):
        case.fit()


@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`|.*does not have many workers")
def test_stages_of_an_earlier_trainer() -> None:
    module = stepping(twice)()
    again = Case("computed 2 losses", lambda: module, STAGES, TEN)
    broken = replace(again, message="and its last step was broken off. Start a new job")
    other = replace(again, message="cut for pipeline_parallel_size=2 with stages_per_rank", layout=SHARDED)
    with pretended_ranks(2):
        for case in (again, broken, other):
            with pytest.raises(REFUSED, match=case.message):
                case.fit()


ALONE = {
    "plain strategy": Case("needs a strategy that runs all microbatches", data=TEN, strategy="auto"),
    "accumulated": Case("accumulate_grad_batches=2", data=TEN, accumulate=2),
    "packs": Case("make 2 packs a step. Set Packs", data=planned(Packs(3)), accumulate=2),
    "whole steps": Case("but a THDStep holds all", data=loader([THDStep(UNALIGNED().dataset)]), accumulate=2),
    "manual": Case("under automatic optimisation", OF_STAGES["manual"].module, data=TEN),
    "no loss": Case("returned NoneType for a microbatch", stepping(lambda *_: None, "qwen3"), data=MANY),
    "a metric by step": Case(
        r"self\.log\('own', MeanMetric, on_step=True\) in a step of several",
        stepping(logs_its_own),
        data=MANY,
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_jobs_on_one_device(name: str) -> None:
    case = replace(ALONE[name], strategy=ALONE[name].strategy or "thd")
    with pytest.raises(MisconfigurationException, match=case.message):
        case.fit(1)
    with pytest.raises(MisconfigurationException, match="runs on one device, but the Trainer has 2"):
        replace(case, strategy="thd").fit(2)


def test_a_module_may_be_built_in_init_module() -> None:
    """Lightning warns of it under every strategy that has a context of its own for sharded weights."""
    for strategy in ("thd", "thd_ddp"):
        trainer = quiet_trainer(strategy=strategy)
        with warnings.catch_warnings(action="error"), trainer.init_module():
            nn.Linear(1, 1)
    context = THDModelParallelStrategy.model_sharded_context
    assert context is not ModelParallelStrategy.model_sharded_context


def test_ddp_refuses_every_argument_for_sharded_weights_when_it_is_made() -> None:
    of_ddp = inspect.signature(DDPStrategy.__init__).parameters
    of_ours = inspect.signature(THDDDPStrategy.__init__).parameters
    for name in inspect.signature(THDModelParallelStrategy.__init__).parameters:
        if name in of_ddp or name in of_ours:
            continue
        with pytest.raises(TypeError, match=f"THDDDPStrategy has no {name}="):
            THDDDPStrategy(**{name: 2})
