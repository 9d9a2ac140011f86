"""An optimizer's update that is replayed from a graph equals the eager one bit for bit, or runs eagerly."""

from __future__ import annotations

import copy
import functools
import re
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import lr_scheduler

from lightning_thd import Sequences, THDBatch, THDDataModule
from lightning_thd.callbacks.cuda_graph import CUDAGraphCallback
from lightning_thd.cuda_graph.optimizer import GraphedOptimizer
from tests.cuda_graph.support import GraphModule, graphed, random_batch
from tests.ranks import run_ranks
from tests.tiny import quiet_trainer, sequences, tiny_llama

FITS = [random_batch(seed, count=4) for seed in range(6)]
TOO_LONG = THDBatch.collate([{"input_ids": [5] * 100}])  # runs eagerly
RATE = 2.0**-9  # a number of fp32


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, **{"lr": RATE, "fused": True, **options})


class Job:
    """A model, its graphed step and its optimizer, with or without graphs of the update."""

    def __init__(self, *, captured: bool, make: Callable[..., Any] = adamw, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = tiny_llama(torch.float32)
        self.step = graphed(self.model, keep_gradients=False)
        self.optimizer = make(self.model.parameters(), **options)
        self.graphs = GraphedOptimizer(self.optimizer, self.step) if captured else None
        if self.graphs is not None:
            self.graphs.__enter__()

    def run(self, *batches: THDBatch, clip: float | None = 1.0, to_none: bool = True) -> None:
        for batch in batches:
            self.step(batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=to_none)

    def values(self) -> list[Tensor]:
        states = [x for state in self.optimizer.state.values() for x in state.values() if x is not None]
        return [p.detach().clone() for p in self.model.parameters()] + [x.clone() for x in states]


def both(**options: Any) -> tuple[Job, Job]:
    return Job(captured=True, **options), Job(captured=False, **options)


def assert_equal(a: Job, b: Job) -> None:
    assert len(a.values()) > 20
    torch.testing.assert_close(a.values(), b.values(), rtol=0, atol=0)


def sgd(parameters: Any, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, **{"lr": RATE, "fused": True, **options})


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adamw, {}),
        (adamw, {"amsgrad": True, "maximize": True, "weight_decay": 0.5}),
        (sgd, {}),
        (sgd, {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_updates_equal_eager_ones(make: Any, options: Any, to_none: bool) -> None:
    """Single batches, sums of two and three, and a batch that runs eagerly, in turn."""
    jobs = both(make=make, **options)
    for job in jobs:
        for batches in (FITS[:1], FITS[1:2], FITS[:2], FITS[2:5], [TOO_LONG], FITS[4:5], FITS[3:5]):
            job.run(*batches, to_none=to_none)
    assert_equal(*jobs)
    stats = jobs[0].step.stats
    # The first step runs eagerly, and so does the batch that fits no bucket, unless autograd adds its
    # gradients to zeros in tensors of the graphs.
    assert stats.optimizer_replays == (5 if to_none else 6)
    assert set(stats.optimizer_fallbacks) == ({"gradients"} if to_none else set())
    assert jobs[1].step.stats.optimizer_replays == 0


@pytest.mark.parametrize("kind", ["cosine", "lambda", "one cycle"])
def test_a_schedule_of_the_learning_rate_is_followed_in_fp32(kind: str) -> None:
    make: dict[str, Any] = {
        "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.01, total_steps=20, cycle_momentum=False),
    }
    jobs = both()
    rates = []

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as torch's, of schedules whose optimizer takes no steps
        for job in jobs:
            schedule = make[kind](job.optimizer)
            for batch in FITS:
                (group,) = job.optimizer.param_groups
                exact = group["lr"]
                rates.append(exact)
                if job.graphs is None or batch is FITS[0]:  # the first step runs eagerly in both
                    group["lr"] = float(np.float32(exact))
                job.run(batch)
                assert isinstance(group["lr"], float)
                group["lr"] = exact
                schedule.step()

    assert len(set(rates)) == len(FITS)
    assert_equal(*jobs)
    assert jobs[0].step.stats.optimizer_replays == len(FITS) - 1


def changed_betas(job: Job) -> None:
    job.optimizer.param_groups[0]["betas"] = (0.8, 0.9)


def resumed(job: Job) -> None:
    state = copy.deepcopy(job.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"].mul_(0.5)
    job.optimizer.load_state_dict(state)


def frozen(job: Job) -> None:
    job.model.model.norm.weight.requires_grad_(False)


def moved(job: Job) -> None:
    job.model.lm_head.weight.data = job.model.lm_head.weight.data.clone()


def one_more_group(job: Job) -> None:
    extra = nn.Parameter(torch.ones(3))
    job.optimizer.add_param_group({"params": [extra], "lr": 2.0**-5})


def other_state(job: Job) -> None:
    state = job.optimizer.state[job.model.lm_head.weight]
    state["exp_avg"] = state["exp_avg"] * 2.0


@pytest.mark.parametrize("change", [changed_betas, resumed, frozen, moved, one_more_group, other_state])
def test_what_changes_between_steps_is_followed(change: Callable[[Job], None]) -> None:
    jobs = both()
    for job in jobs:
        job.run(FITS[0])
        job.run(FITS[1])
        change(job)
        for batch in FITS[2:]:
            job.run(batch)
    assert_equal(*jobs)
    assert jobs[0].step.stats.optimizer_replays >= 3


def test_settings_that_change_in_every_step_turn_the_graphs_off() -> None:
    jobs = both()
    for job in jobs:
        job.step.require = False
        for i in range(30):
            job.optimizer.param_groups[0]["weight_decay"] = 0.01 * i
            if job.graphs is not None and i == 25:
                with pytest.warns(UserWarning, match="runs eagerly.*pass cycle_momentum=False"):
                    job.run(FITS[i % 6])
            else:
                job.run(FITS[i % 6])
    assert_equal(*jobs)


def test_hooks_of_the_optimizer_run_once_in_every_step() -> None:
    jobs = both()
    calls: list[list[str]] = []
    for job in jobs:
        calls.append([])
        note = calls[-1].append
        job.optimizer.register_step_pre_hook(lambda *_, note=note: note("before"))
        job.optimizer.register_step_post_hook(lambda *_, note=note: note("after"))

        def closure(job: Job = job, note: Any = note) -> Tensor:
            note("closure")
            job.optimizer.zero_grad()
            loss = job.step(FITS[0])
            loss.backward()
            return loss

        for _ in range(3):
            assert float(job.optimizer.step(closure).detach()) > 0
    assert calls[0] == calls[1] == ["before", "closure", "after"] * 3
    assert jobs[0].step.stats.optimizer_replays == 2
    assert_equal(*jobs)


def test_the_optimizer_is_given_back() -> None:
    job = Job(captured=False)
    schedule = lr_scheduler.StepLR(job.optimizer, 1)
    before = job.optimizer.step
    with GraphedOptimizer(job.optimizer, job.step):
        assert job.optimizer.step != before
    assert job.optimizer.step is before
    del schedule, job.optimizer.step
    with GraphedOptimizer(job.optimizer, job.step):
        pass
    assert "step" not in vars(job.optimizer)


class Counting(torch.optim.AdamW):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


def replaced(parameters: Any) -> torch.optim.AdamW:
    optimizer = adamw(parameters)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


def wrapped(parameters: Any) -> torch.optim.AdamW:
    """Return an optimizer whose step was wrapped as a schedule wraps it, by a function that does more."""
    optimizer = adamw(parameters)

    @functools.wraps(type(optimizer).step)
    def noisy(*args: Any) -> Any:
        return type(optimizer).step(optimizer, *args)

    optimizer.step = noisy  # type: ignore[method-assign]
    return optimizer


def scheduled_then_wrapped(parameters: Any) -> torch.optim.AdamW:
    optimizer = adamw(parameters)
    lr_scheduler.StepLR(optimizer, 1)
    of_schedule = optimizer.step

    @functools.wraps(of_schedule)
    def noisy(*args: Any) -> Any:
        return of_schedule(*args)

    optimizer.step = noisy  # type: ignore[method-assign]
    return optimizer


def wrapped_then_scheduled(parameters: Any) -> torch.optim.AdamW:
    optimizer = adamw(parameters)
    of_class = optimizer.step

    def noisy(self: Any, *args: Any) -> Any:
        return of_class(*args)

    optimizer.step = types.MethodType(noisy, optimizer)  # type: ignore[method-assign]
    lr_scheduler.StepLR(optimizer, 1)
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.AdamW(p), r"fused=None and capturable=False. Pass .*fused=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "SGD has a group with fused=None"),
        (lambda p: Counting(p, fused=True), "Counting is another, whose step may do work on the host"),
        (replaced, "step was replaced by .*lambda"),
        (wrapped, "step was replaced by"),
        (scheduled_then_wrapped, "step was replaced by"),
        (wrapped_then_scheduled, "step was replaced by"),
    ],
)
def test_other_optimizers_are_refused(make: Any, message: str) -> None:
    job = Job(captured=False)
    with pytest.raises(ValueError, match=message):
        GraphedOptimizer(make(job.model.parameters()), job.step)


class Module(GraphModule):
    """Trains in fp32 with a fused optimizer, whose rates are numbers of fp32."""

    def __init__(self, make: Callable[..., Any] = adamw) -> None:
        super().__init__(dtype=torch.float32)
        self.make = make

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.model.parameters())
        schedule = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(*callbacks: Any, module: Any = None, step: Any = None, **options: Any) -> tuple[Any, Any]:
    module = module or Module()
    checkpoint = options.pop("ckpt_path", None)
    defaults: dict[str, Any] = {"max_steps": 6, "gradient_clip_val": 0.5, "log_every_n_steps": 1}
    trainer = quiet_trainer(callbacks=list(callbacks), **{**defaults, **options})
    data = THDDataModule(sequences(90), capacity=96, global_batch=step)
    trainer.fit(module, data, ckpt_path=checkpoint)
    return module, trainer


def graphs(**options: Any) -> CUDAGraphCallback:
    defaults: dict[str, Any] = {"backend": "recording", "max_sequences": (6, 9), "require": True}
    return CUDAGraphCallback(**{**defaults, **options})


class Scaled(L.Callback):
    """Changes gradients before every update, in their memory or in new tensors."""

    def __init__(self, *, in_place: bool) -> None:
        self.in_place = in_place

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if self.in_place:
                parameter.grad.mul_(0.5)
            else:
                parameter.grad = parameter.grad * 0.5


class HooksFromTheStart(L.Callback):
    """Registers hooks of two parameters before training, which change their gradients."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        def double(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(2.0)

        pl_module.model.lm_head.weight.register_hook(lambda gradient: gradient * 0.5)
        pl_module.model.model.norm.weight.register_post_accumulate_grad_hook(double)


class StepsOfEverySecondBatch(Module):
    """Overrides Lightning's ``optimizer_step`` and leaves out every second update."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class OwnClipping(Module):
    """Clips two parts of the model by norms of their own."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.model.lm_head.parameters(), 0.1)
        nn.utils.clip_grad_norm_(self.model.model.parameters(), 0.3)


class HookInTheMiddle(L.Callback):
    """Registers a hook of a parameter after five updates, which halves its gradient."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            pl_module.model.lm_head.weight.register_hook(lambda gradient: gradient * 0.5)


# Options of a Trainer and its module's class, other callbacks, and whether updates are replayed.
CASES: dict[str, tuple[dict[str, Any], Callable[[], list[Any]], bool]] = {
    "plain": ({}, list, True),
    "accumulation": ({"accumulate_grad_batches": 2}, list, True),
    "clipping by value": ({"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01}, list, True),
    "averages": ({}, lambda: [EMAWeightAveraging(decay=0.5)], True),
    "microbatches": ({"strategy": "thd", "step": Sequences(20)}, list, True),
    "scaled in place": ({}, lambda: [Scaled(in_place=True)], True),
    "new gradients": ({}, lambda: [Scaled(in_place=False)], False),
    "a hook in the middle": ({"max_steps": 8}, lambda: [HookInTheMiddle()], True),
    "hooks from the start": ({}, lambda: [HooksFromTheStart()], False),
    "hooks and accumulation": ({"accumulate_grad_batches": 2}, lambda: [HooksFromTheStart()], False),
    "every second update": ({"module": StepsOfEverySecondBatch, "max_steps": 8}, list, True),
    "clipping of its own": ({"module": OwnClipping, "gradient_clip_val": None}, list, True),
}


@pytest.mark.filterwarnings("ignore:training_step returns .* beside the loss")
@pytest.mark.parametrize("case", list(CASES))
def test_a_fit_is_the_same_bit_for_bit(case: str) -> None:
    options, others, replays = CASES[case]
    trainer_options = {**options}
    make_module = trainer_options.pop("module", Module)

    runs = []
    for capture in (True, False):
        callback = graphs(capture_optimizer=capture)
        module, _ = fit(callback, *others(), module=make_module(), **trainer_options)
        runs.append((module, callback.stats))
    (ours, stats), (plain, _) = runs
    torch.testing.assert_close(dict(ours.named_parameters()), dict(plain.named_parameters()), rtol=0, atol=0)
    assert ours.outputs == plain.outputs
    assert (stats.optimizer_replays > 0) == replays, stats
    assert "cuda_graph/optimizer_hit_rate" in stats.metrics()


def test_a_fit_that_is_resumed_in_the_middle_is_the_same(tmp_path: Path) -> None:
    whole, _ = fit(graphs(capture_optimizer=True))
    for capture in (True, False):
        _, trainer = fit(graphs(capture_optimizer=True), max_steps=3)
        trainer.save_checkpoint(tmp_path / "middle.ckpt")
        callback = graphs(capture_optimizer=capture)
        resumed, _ = fit(callback, ckpt_path=tmp_path / "middle.ckpt")
        torch.testing.assert_close(
            dict(resumed.named_parameters()), dict(whole.named_parameters()), rtol=0, atol=0
        )
        assert (callback.stats.optimizer_replays > 0) == capture


def test_what_a_trainer_does_not_allow_is_refused_when_training_starts() -> None:
    unfused = Module(make=lambda parameters: torch.optim.AdamW(parameters, lr=RATE))
    with pytest.raises(MisconfigurationException, match=r"fused=None .*leave capture_optimizer out"):
        fit(graphs(capture_optimizer=True), module=unfused)
    with pytest.raises(ValueError, match="keep_gradients=True gives every step new ones"):
        CUDAGraphCallback(capture_optimizer=True, keep_gradients=True)


class TwoOptimizers(Module):
    """Has an optimizer for the head and one for the rest, which Lightning runs by hand only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [adamw(self.model.lm_head.parameters()), adamw(self.model.model.parameters())]


def test_several_optimizers_are_refused_by_name() -> None:
    expected = "capture_optimizer=True.*automatic_optimization=False.*Leave capture_optimizer out"
    with pytest.raises(MisconfigurationException, match=expected):
        fit(graphs(capture_optimizer=True, require=False), module=TwoOptimizers(), gradient_clip_val=None)


def refused_on_a_rank(strategy: str) -> str:
    """Start a fit on this rank that must be refused; return the message."""
    callback = graphs(capture_optimizer=True, require=False)
    with pytest.raises(MisconfigurationException) as raised:
        fit(callback, strategy=strategy, devices=2)
    return str(raised.value)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("ddp", "needs one process, and the job has 2.*Leave capture_optimizer out"),
        ("thd_ddp", "needs one process, and the job has 2.*Leave capture_optimizer out"),
        ("thd_model_parallel", "but the module is sharded by .*Leave capture_optimizer out"),
    ],
)
def test_several_processes_are_refused_by_name_on_each(strategy: str, message: str) -> None:
    for refusal in run_ranks(refused_on_a_rank, 2, strategy, timeout_s=90.0):
        assert re.search(message, refusal), refusal
