"""Accelerate and Fabric loops equal the hand-written loop over sequences that were never packed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import accelerate
import lightning as L
import pytest
import torch
from lightning.fabric.strategies import DataParallelStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_thd import Packs, Sequences, THDDataModule
from lightning_thd.data.streams import Stream
from lightning_thd.integrations import PackedLoop, prepare_fabric, prepare_thd
from lightning_thd.integrations.packed_loop import evaluating
from lightning_thd.packing import PackPlanner
from lightning_thd.parallel.tensor import apply_tensor_parallel, model_plan
from lightning_thd.strategies.norms import clip_by_norm
from tests.integrations.support import (
    CAPACITY,
    STEPS,
    by_hand,
    check_ranks,
    epochs,
    make_data,
    make_loop,
    mean_nll,
    run,
    strip,
)
from tests.packing.test_prefixes import rows as prefixed
from tests.ranks import run_ranks
from tests.strategies.jobs import full_parameters
from tests.tiny import TinyModule, largest_error, sequences, tiny_llama, train_by_hand
from tests.wide import nothing_narrower

ENGINES = ("accelerate", "fabric")


def run_engine(engine: str, step: Any, accumulate: int) -> Any:
    _, loop = make_loop(engine, step, accumulate)
    return run(loop, STEPS)


def in_both(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run both engines on the same ranks, which take longer to start than to train."""
    return [fn(engine, *args) for engine in ENGINES]


@pytest.mark.parametrize(("step", "accumulate"), [(Packs(4), 2), (Sequences(12), 1)])
def test_two_ranks_equal_the_hand_loop(step: Any, accumulate: int) -> None:
    for ranks in zip(*run_ranks(in_both, 2, run_engine, step, accumulate), strict=True):
        check_ranks(ranks, *by_hand(step, 2), 1e-12)


def run_shared(engine: str) -> Any:
    data = THDDataModule(prefixed(), capacity=64, global_batch=Sequences(48), share_prefixes=True)
    with nothing_narrower():
        return run(make_loop(engine, None, data=data)[1], 2)


def test_shared_prefixes_on_two_ranks_equal_the_hand_loop() -> None:
    """Every step has all sequences, so that the order of the plan does not matter."""
    of_engines = run_ranks(in_both, 2, run_shared)
    samples = prefixed()
    planner = PackPlanner([len(s["input_ids"]) for s in samples], 64, global_batch=Sequences(48))
    with nothing_narrower():
        params, expected = train_by_hand(samples, planner, 2)
    for ranks in zip(*of_engines, strict=True):
        check_ranks(ranks, strip(params), expected, 1e-9)


def _save(engine: str, folder: str) -> Any:
    owner, loop = make_loop(engine, Sequences(12))
    batches = epochs(loop)
    run(loop, 2, batches)
    if engine == "accelerate":
        owner.save_state(f"{folder}/a")
    else:
        owner.save(Path(folder) / "f.ckpt", _fabric_state(loop))
    return run(loop, 2, batches)


def _resume(engine: str, folder: str) -> Any:
    owner, loop = make_loop(engine, Sequences(12))
    if engine == "accelerate":
        owner.load_state(f"{folder}/a")
    else:
        owner.load(Path(folder) / "f.ckpt", _fabric_state(loop))
    return (*run(loop, 2), loop.global_step)


def _fabric_state(loop: PackedLoop) -> dict[str, Any]:
    names = ("model", "optimizer", "scheduler", "loader")
    return {"loop": loop, **{name: getattr(loop, name) for name in names}}


@pytest.mark.filterwarnings("ignore")  # torch.save of a scheduler warns; resuming is what counts
def test_saved_on_two_ranks_and_resumed_on_one_goes_on_with_the_same_sequences(tmp_path: Path) -> None:
    saved = zip(*run_ranks(in_both, 2, _save, str(tmp_path)), strict=True)
    [resumed] = run_ranks(in_both, 1, _resume, str(tmp_path))
    for before, (params, _, seen, global_step) in zip(saved, resumed, strict=True):
        assert global_step == 4
        assert largest_error(params, before[0][0]) < 1e-12
        for k, step in enumerate(seen):
            both = [i for rank in before for ids in rank[2][k] for i in ids]
            assert sorted(i for ids in step for i in ids) == sorted(both)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.filterwarnings("ignore:The stream cannot save")
@pytest.mark.parametrize("streamed", [False, True])
def test_a_step_that_was_fetched_but_not_run_is_the_next_one(engine: str, streamed: bool) -> None:
    rows = sequences(60, labels=True)

    def loop() -> PackedLoop:
        source = Stream(lambda: iter(rows), window=20) if streamed else rows
        data = THDDataModule(source, capacity=CAPACITY, global_batch=Sequences(12))
        return make_loop(engine, None, data=data)[1]

    whole = loop()
    stopped = loop()
    states = []
    *_, expected = run(whole, 4)
    for k, step in enumerate(stopped.loader):
        if k == 2:
            states.append(stopped.loader.state_dict())
            break
        run(stopped, 1, [step])
    for state in (*states, stopped.loader.state_dict()):
        again = loop()
        again.loader.load_state_dict(state)
        assert run(again, 2)[2] == expected[2:]
    if streamed:  # its next iteration continues
        assert run(stopped, 2)[2] == expected[2:]


@pytest.mark.filterwarnings("ignore")  # torch.save of a scheduler warns
@pytest.mark.parametrize("streamed", [False, True])
def test_a_state_that_is_loaded_inside_a_loop_ends_it(streamed: bool, tmp_path: Path) -> None:
    source: Any = (lambda part, parts: iter(sequences(60))) if streamed else sequences(60)
    data = THDDataModule(source, capacity=CAPACITY, global_batch=Sequences(6))
    owner, loop = make_loop("accelerate", None, data=data)
    seen: list[Any] = []

    def train() -> None:
        for step in loop.loader:
            run(loop, 1, [step])
            seen.append([b.sequence_ids for b in step.microbatches])
            if len(seen) == 2:
                owner.save_state(tmp_path)
            elif len(seen) == 4:
                owner.load_state(tmp_path)

    with pytest.raises(ValueError, match="inside a loop over it"):
        train()
    assert run(loop, 2)[2] == seen[2:]
    assert loop.loader.state_dict()["step"] == 4


REFUSED = {
    "loader": "ValueError: The data have the type DataLoader; wanted a THDDataModule",
    "packs": "x gradient_accumulation_steps=1 make 1 packs a step. Set Packs(1)",
    "sequences": "gradient_accumulation_steps=2, but with a pipeline",
    "cp": "cp_size=2: its context parallelism replaces every mask",
    "engine": "The accelerator runs DEEPSPEED, whose engine accumulates, clips and steps by itself",
    "accumulate": (
        "ValueError: loop.backward() runs inside accelerator.accumulate(), but the loader yields whole "
        "optimizer steps, of which Accelerate would skip most"
    ),
    "after it": "",  # a notebook's next try, with a new Accelerator
    "batch": "AttributeError: 'THDBatch' object has no attribute 'microbatches'",
    "skip": "AttributeError: 'THDLoader' object has no attribute 'dataset'",
    "scheduler": "",  # of one process, it steps once
}


def _refused(kind: str) -> str:
    accelerate.state.AcceleratorState._reset_state(True)
    accumulate = 2 if kind in ("sequences", "accumulate") else 1
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.ConstantLR(optimizer)
    steps = {"packs": Packs(3), "sequences": Sequences(4)}
    data: Any = torch.utils.data.DataLoader([1, 2]) if kind == "loader" else make_data(steps.get(kind))

    if kind == "cp":
        accelerator.state.parallelism_config = accelerate.ParallelismConfig(cp_size=2)
    elif kind == "engine":
        accelerator.state.distributed_type = accelerate.DistributedType.DEEPSPEED
    elif kind == "scheduler":
        scheduler = accelerator.prepare(scheduler)

    try:
        loop = prepare_thd(accelerator, model, data, optimizer, scheduler, peak=1e9)
        step = next(iter(loop.loader))
        if kind == "accumulate":
            with accelerator.accumulate(loop.model):
                loop.backward(step)
        elif kind == "after it":
            loop.backward(step)
        elif kind == "batch":
            loop.backward(step.microbatches[0])  # type: ignore[arg-type]
        elif kind == "skip":
            accelerator.skip_first_batches(loop.loader, 2)
    except Exception as err:
        return f"{type(err).__name__}: {err}"

    return ""


def _all_refused(kinds: list[str]) -> dict[str, str]:
    return {kind: _refused(kind) for kind in kinds}


def test_what_would_leak_skip_steps_or_change_the_loss_is_refused() -> None:
    [messages] = run_ranks(_all_refused, 1, [*REFUSED])
    assert [kind for kind, message in REFUSED.items() if message not in messages[kind]] == [], messages
    assert messages["scheduler"] == messages["after it"] == ""
    for rank in run_ranks(_all_refused, 2, ["scheduler"]):
        assert "scheduler was prepared by Accelerate, which steps it 2" in rank["scheduler"]


def test_strategies_of_fabric_that_cut_batches_or_step_by_themselves_are_refused() -> None:
    engine = type("DeepSpeedStrategy", (), {"__module__": "lightning.fabric.strategies.deepspeed"})
    for strategy, why in (
        (DataParallelStrategy(), "which cuts packs"),
        (engine(), "whose engine accumulates"),
    ):
        fabric: Any = object.__new__(L.Fabric)
        fabric._strategy = strategy
        with pytest.raises(ValueError, match=rf"prepare_fabric under \w+Strategy, {why}.*Use Fabric"):
            prepare_fabric(fabric, tiny_llama(), make_data(Packs(1)), None)


def _cut(model: Any, mesh: Any) -> Any:
    """Cut weights over the mesh's tensor axis and shard them over its data axis."""
    if mesh["tensor_parallel"].size() > 1:
        apply_tensor_parallel(model, model_plan(model), mesh["tensor_parallel"])
    if mesh["data_parallel"].size() > 1:
        fully_shard(model, mesh=mesh["data_parallel"]).set_force_sum_reduction_for_comms(True)
    return model


def _model_parallel(dp: int, tp: int, kind: str) -> Any:
    strategy = ModelParallelStrategy(_cut, data_parallel_size=dp, tensor_parallel_size=tp)
    fabric = L.Fabric(accelerator="cpu", devices=dp * tp, strategy=strategy)
    fabric.launch()
    model: Any = tiny_llama()

    def optimizer(module: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=TinyModule().lr, momentum=0.9, foreach=False)

    optimizers: Any = optimizer
    if kind == "prepared":
        model = fabric.setup_module(model)
        optimizers = fabric.setup_optimizers(optimizer(model))
    elif kind == "stale":
        optimizers = optimizer(model)
    try:
        loop = prepare_fabric(fabric, model, make_data(Sequences(12)), optimizers, peak=1e9)
    except ValueError as err:
        return str(err)
    losses = []
    bare = loop.model.module
    for _, batch in zip(range(STEPS), epochs(loop), strict=False):
        losses.append(float(loop.backward(batch)))
        clip_by_norm(bare.parameters(), 0.5)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        for group in loop.optimizer.param_groups:
            group["lr"] *= 0.9
    return full_parameters(bare), losses


def _every_model_parallel() -> list[Any]:
    return [_model_parallel(*how) for how in ((1, 2, "function"), (2, 1, "prepared"), (1, 2, "stale"))]


@pytest.fixture(scope="module")
def model_parallel() -> list[Any]:
    """What two ranks under Fabric's model parallelism trained with each optimizer, or the error."""
    return list(zip(*run_ranks(_every_model_parallel, 2), strict=True))


def test_fabric_model_parallel_equals_the_hand_loop(model_parallel: list[Any]) -> None:
    for dp, ranks in zip((1, 2), model_parallel[:2], strict=True):
        check_ranks(ranks, *by_hand(Sequences(12), dp), 1e-12)


def test_fabric_takes_no_optimizer_of_replaced_parameters(model_parallel: list[Any]) -> None:
    for message in model_parallel[2]:
        assert "parameters that are not the prepared model's: ModelParallelStrategy has replaced" in message


def _evaluate(engine: str) -> Any:
    owner, loop = make_loop(engine, Sequences(12))
    logged: dict[str, float] = {}
    name = {"accelerate": "log", "fabric": "log_dict"}[engine]
    setattr(owner, name, lambda metrics, *_, **__: logged.update(metrics))
    samples = sequences(23, labels=True, seed=4)
    data = THDDataModule(samples, val=samples, capacity=CAPACITY, global_batch=Packs(4))
    data.attach(ranks=2, accumulate=2)  # the data module of training
    first = loop.evaluate(data)
    batches = epochs(loop)
    loop.backward(next(batches))

    with pytest.raises(ValueError, match=r"runs one set, but val= names several. Pass them one by one"):
        loop.evaluate(THDDataModule(val={"a": samples, "b": samples}, capacity=CAPACITY))
    with pytest.raises(TypeError, match=r"evaluate\(\) is a dict.* Pass THDDataModule"):
        loop.evaluate(samples)

    return first, loop.evaluate(data), logged, loop.model.training


def test_evaluation_on_packs_is_the_mean_over_all_loss_tokens() -> None:
    loss, tokens = mean_nll(sequences(23, labels=True, seed=4))
    for first, again, logged, training in chain(*run_ranks(in_both, 2, _evaluate)):
        assert first == {"val/loss": pytest.approx(loss, rel=1e-12), "val/loss_tokens": tokens}
        assert first == again == logged
        assert training


def test_parts_that_were_frozen_in_evaluation_mode_stay_in_it() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model[0].eval()
    for held in (model, L.Fabric(accelerator="cpu").setup_module(model)):
        with evaluating(held):
            assert not any(child.training for child in held.modules())
            assert not torch.is_grad_enabled()
        assert [child.training for child in model] == [False, True]
        assert held.training


def _several_optimizers(engine: str) -> float:
    """Train three steps with two optimizers, which share the parameters, and with one of all of them."""
    trained = []
    for parts in (1, 2):
        model = tiny_llama()
        parameters = list(model.parameters())
        halves = [parameters] if parts == 1 else [parameters[:5], parameters[5:]]
        optimizers: Any = [torch.optim.SGD(half, lr=0.5, momentum=0.9) for half in halves]
        chosen = optimizers if parts == 2 else optimizers[0]
        if engine == "accelerate":
            loop = prepare_thd(accelerate.Accelerator(cpu=True), model, make_data(None), chosen, peak=1e9)
        else:
            fabric = L.Fabric(accelerator="cpu", devices=1)
            loop = prepare_fabric(fabric, model, make_data(None), chosen, peak=1e9)
        prepared = loop.optimizer if parts == 2 else [loop.optimizer]
        assert len(prepared) == parts
        for _, step in zip(range(3), loop.loader, strict=False):
            loop.backward(step)
            for each in prepared:
                each.step()
                each.zero_grad()
        trained.append({name: p.detach().clone() for name, p in model.named_parameters()})

    assert largest_error(trained[0], dict(tiny_llama().named_parameters())) > 1e-3
    return largest_error(*trained)


def test_several_optimizers_step_like_one() -> None:
    assert [*chain(*run_ranks(in_both, 1, _several_optimizers))] == [0.0, 0.0]


def _accumulation_changed() -> list[dict[str, torch.Tensor]]:
    gradients = []
    for later in (5, 2):
        accelerator, loop = make_loop("accelerate", Packs(2), 2)
        accelerator.gradient_accumulation_steps = later
        loop.backward(next(iter(loop.loader)))
        gradients.append({name: p.grad for name, p in loop.model.named_parameters()})
    return gradients


def test_gradients_do_not_follow_an_accumulation_that_is_changed_later() -> None:
    [(actual, expected)] = run_ranks(_accumulation_changed, 1)
    assert largest_error(actual, expected) < 1e-12
    assert max(float(gradient.norm()) for gradient in expected.values()) > 1e-3


def test_an_accumulation_that_is_no_whole_number_is_refused() -> None:
    fabric = L.Fabric(accelerator="cpu")
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="accumulate is a Tensor of .*; wanted a whole number, an int"):
        prepare_fabric(fabric, model, make_data(None), optimizer, accumulate=torch.ones(2), peak=1e9)  # type: ignore[arg-type]
