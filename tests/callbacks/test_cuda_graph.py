"""Training with the callback equals training without it; where graphs are not possible, nothing changes."""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from lightning_thd import Sequences, THDBatch, THDDataModule, THDThroughputMonitor, causal_lm_loss
from lightning_thd.callbacks.cuda_graph import CUDAGraphCallback, GraphCosts
from lightning_thd.cuda_graph.recording import RecordingBackend
from lightning_thd.models.preparing import is_prepared
from tests.callbacks.fits import Clock
from tests.cuda_graph.support import GraphModule, graphed, random_batch
from tests.tiny import TinyModule, largest_error, quiet_trainer, sequences, tiny_llama

CAPACITY = 96


def callback(**kwargs: Any) -> CUDAGraphCallback:
    return CUDAGraphCallback(**{"backend": "recording", "max_sequences": (6, 9), "require": True, **kwargs})


def fit(
    *callbacks: L.Callback, module: L.LightningModule | None = None, data: Any = None, **kwargs: Any
) -> tuple[Any, L.Trainer]:
    module = module or GraphModule()
    defaults = {"max_steps": 6, "log_every_n_steps": 1, "gradient_clip_val": 0.5}
    step = kwargs.pop("step", None)
    trainer = quiet_trainer(callbacks=list(callbacks), **{**defaults, **kwargs})
    trainer.fit(module, data or THDDataModule(sequences(90), capacity=CAPACITY, global_batch=step))
    return module, trainer


def parameters(module: L.LightningModule) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def assert_same(a: tuple[Any, L.Trainer], b: tuple[Any, L.Trainer], tolerance: float = 1e-12) -> None:
    assert largest_error(parameters(a[0]), parameters(b[0])) < tolerance
    assert a[0].outputs == pytest.approx(b[0].outputs, rel=tolerance)
    assert a[0].events == b[0].events
    assert len(a[0].events) >= 6
    assert a[1].callback_metrics.keys() == b[1].callback_metrics.keys()
    for key, value in b[1].callback_metrics.items():
        # Lightning keeps logs in fp32, where the last bit may round either way.
        assert float(a[1].callback_metrics[key]) == pytest.approx(float(value), rel=max(tolerance, 2e-7)), key


class Repeated(L.LightningDataModule):
    """A data module that knows no planner."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_training_is_the_same(steps: int) -> None:
    """Clipping, momentum, a scheduler and logs are in every fit."""
    graphs = callback()
    with_graphs = fit(graphs, accumulate_grad_batches=2, max_steps=steps)
    # Fifty batches of momentum grow rounding a thousandfold.
    tolerance = 1e-12 if steps == 3 else 1e-9
    assert_same(with_graphs, fit(accumulate_grad_batches=2, max_steps=steps), tolerance)
    assert graphs.stats.replays >= 2
    assert set(graphs.stats.fallbacks) == {"num_sequences"}


class SwitchedByHand(TinyModule):
    """Calls a model that nothing but the callback prepares: no loss or strategy of this package does."""

    def __init__(self) -> None:
        super().__init__()
        config = copy.deepcopy(self.model.config)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
        self.model.config._attn_implementation = "thd"

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        logits: torch.Tensor = self.model(**batch.hf_kwargs()).logits
        return torch.nn.functional.cross_entropy(logits[0], batch.targets, reduction="sum") * batch.loss_scale


def test_a_model_that_was_switched_by_hand_is_prepared() -> None:
    graphs = callback()
    module, _ = fit(graphs, module=SwitchedByHand(), max_steps=3)
    assert is_prepared(module.model)
    assert graphs.stats.replays


@pytest.mark.filterwarnings("ignore:training_step returns .* beside the loss")
def test_steps_of_several_microbatches_are_the_same() -> None:
    graphs = callback()
    runs = [fit(*c, strategy="thd", step=Sequences(20)) for c in ((graphs,), ())]
    assert_same(*runs)
    assert graphs.stats.replays > 6


def test_without_a_planner_the_first_batches_are_observed() -> None:
    batches = [random_batch(seed, count=5) for seed in range(40)]
    batches[::4] = [THDBatch.collate([{"input_ids": range(3, 9), "weights": 0.5}])] * 10  # run eagerly
    graphs = callback(max_sequences="auto")
    graphed = fit(graphs, data=Repeated(batches), max_steps=40, gradient_clip_val=None)
    assert graphs.stats.replays >= 6
    assert graphs.plan is not None
    assert graphs.plan.chosen.coverage == 0.75
    assert graphs.step is not None
    assert graphs.step.buckets[0].slots == 128
    assert_same(graphed, fit(data=Repeated(batches), max_steps=40, gradient_clip_val=None), 1e-10)


def test_auto_chooses_from_the_planner_and_rates_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    graphs = callback(max_sequences="auto", costs=GraphCosts(eager=1.0, graph=0.5, per_sequence=0.01))
    with caplog.at_level("INFO"):
        fit(graphs, logger=logger, accumulate_grad_batches=2, max_steps=3)
    assert graphs.plan is not None
    assert graphs.plan.slots == CAPACITY
    assert 1 <= len(graphs.plan.buckets()) <= 3
    assert graphs.stats.hit_rate > 0.5
    assert caplog.text.count("expected speed-up") == 1
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    assert {"cuda_graph/hit_rate", "cuda_graph/capture_time_s", "train/loss_step"} <= rows[0].keys()
    assert [row["step"] for row in rows if row["cuda_graph/hit_rate"]] == ["0", "1", "2", "3"]


def test_training_step_is_given_back_and_a_second_fit_captures_anew() -> None:
    class Boom(Exception):
        pass

    class Breaks(GraphModule):
        def on_train_batch_end(self, *args: Any) -> None:
            assert "training_step" in self.__dict__
            raise Boom

    graphs = callback()
    module, _ = fit(graphs)
    assert "training_step" not in module.__dict__
    first = graphs.stats
    fit(graphs, module=module)
    assert graphs.stats is not first
    assert graphs.stats.replays > 0
    broken = Breaks()
    with pytest.raises(Boom):
        fit(callback(), module=broken)
    assert not {"training_step", "log"} & broken.__dict__.keys()


class Saves(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def test_validation_checkpoints_and_resume_are_the_same(tmp_path: Path) -> None:
    def data() -> THDDataModule:
        return THDDataModule(sequences(90), val=sequences(20, seed=1), capacity=CAPACITY)

    options: dict[str, Any] = {"val_check_interval": 2, "max_steps": 6}
    graphs = callback()
    graphed = fit(graphs, Saves(tmp_path / "a.ckpt"), data=data(), **options)
    expected = fit(Saves(tmp_path / "b.ckpt"), data=data(), **options)
    assert_same(graphed, expected)
    assert "val/loss" in graphed[1].callback_metrics
    a, b = (torch.load(tmp_path / f, weights_only=False) for f in ("a.ckpt", "b.ckpt"))
    assert a["state_dict"].keys() == b["state_dict"].keys()
    resumed = GraphModule()
    trainer = quiet_trainer(gradient_clip_val=0.5, callbacks=[callback()], **options)
    trainer.fit(resumed, data(), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert largest_error(parameters(resumed), parameters(expected[0])) < 1e-12


class Timed(GraphModule):
    """Every training step takes a second, replayed or not."""

    def __init__(self, clock: Clock, *, captures: bool = True) -> None:
        super().__init__()
        self.clock = [clock]
        self.captures = captures

    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return output if self.captures else {**output, "loss": output["loss"] * output["loss"].item()}

    def on_after_backward(self) -> None:
        self.clock[0].sleep(1.0)
        super().on_after_backward()


class Slow(RecordingBackend):
    """Every capture, or attempt at one, takes a thousand seconds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def capture(self, function: Any) -> Any:
        self.clock.sleep(1000.0)
        return super().capture(function)


@pytest.mark.parametrize("captures", [True, False])
def test_the_step_that_captures_is_left_out_of_the_rates(captures: bool) -> None:
    rates = []
    for graphs in (True, False):
        clock = Clock()
        monitor = THDThroughputMonitor(peak=1e9, warmup_steps=0, clock=clock, every_n_steps=6)
        graph = callback(backend=Slow(clock), require=False)
        module = Timed(clock, captures=captures)
        both = (monitor, graph) if graphs else (monitor,)
        if graphs and not captures:
            with pytest.warns(UserWarning, match=r"\.item\(\) reads a value"):
                fit(*both, module=module)
        else:
            fit(*both, module=module)
        rates.append(monitor.latest["train/device/batches_per_sec"])
        assert clock.now >= 1000.0 * graphs
        assert (graph.stats.replays >= 4) == (graphs and captures)
        assert "parameters_moved" not in graph.stats.fallbacks  # by the hooks that count calls
        assert (graph.stats.capture_s > 0) == graphs

    assert rates == pytest.approx([1.0, 1.0])


def test_a_mode_that_watches_operators_sees_them() -> None:
    model = tiny_llama(torch.float64)
    batch = random_batch(1, count=4)
    step = graphed(model)
    step(batch).backward()
    with FlopCounterMode(display=False) as eager:
        causal_lm_loss(model, batch).backward()
    with FlopCounterMode(display=False) as replayed:
        step(batch).backward()
    assert replayed.get_total_flops() == eager.get_total_flops() > 0
    assert step.stats.fallbacks == {"watched": 1}
    step(batch).backward()
    assert step.stats.replays == 2


class LogsMetric(GraphModule):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.mean(output["loss"].detach())
        self.log("mean", self.mean)
        return output


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (LogsMetric, r"the step logs 'mean', a MeanMetric"),
        (TinyModule, r"tiny.py:\d+ in training_step: the step reads batch.sequence_ids"),
    ],
)
def test_a_step_that_cannot_be_captured_trains_as_if_nothing_was_there(module: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        trained = fit(callback(require=False, max_sequences=9), module=module(), max_steps=2)
    expected = fit(module=module(), max_steps=2)
    assert largest_error(parameters(trained[0]), parameters(expected[0])) == 0.0
    assert trained[0].outputs == expected[0].outputs
    for key, value in expected[1].callback_metrics.items():
        assert torch.equal(trained[1].callback_metrics[key], value), key


class Manual(GraphModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.manual_backward(output["loss"])
        self.optimizers().step()
        self.optimizers().zero_grad()
        return output


class Unavailable(RecordingBackend):
    def unavailable(self, device: torch.device) -> str | None:
        return "there is no CUDA device"


SLOW: dict[str, Any] = {"max_sequences": "auto", "costs": GraphCosts(eager=1.0, graph=1.0)}


@pytest.mark.parametrize(
    ("module", "graphs", "options", "message"),
    [
        (GraphModule, {"backend": Unavailable()}, {}, "there is no CUDA device"),
        (Manual, {}, {"gradient_clip_val": None}, "automatic_optimization=False.*GraphedStep"),
        (GraphModule, {"max_sequences": 1}, {}, r"max_sequences=\(1,\) is smaller than any batch needs"),
        (GraphModule, SLOW, {}, "not expected to be faster"),
    ],
)
def test_where_graphs_are_not_possible_the_callback_idles_with_one_message_or_raises(
    module: Any, graphs: Any, options: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        trained = fit(callback(**{"require": False, **graphs}), module=module(), max_steps=2, **options)
    messages = [r.getMessage() for r in caplog.records if "CUDAGraphCallback is idle" in r.getMessage()]
    assert len(messages) == 1
    expected = fit(module=module(), max_steps=2, **options)
    assert largest_error(parameters(trained[0]), parameters(expected[0])) == 0.0
    with pytest.raises(MisconfigurationException, match=message):
        fit(callback(**graphs), module=module(), **options)


class Staged(SingleDeviceStrategy):
    pipeline_parallel_size = 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_training_with_compiled_layers_is_the_same() -> None:
    before = counters["stats"]["unique_graphs"]
    graphs = callback(compile_layers=True)
    assert_same(fit(graphs, max_steps=3), fit(max_steps=3))
    assert graphs.stats.replays >= 2
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Manual, {"gradient_clip_val": None}, "automatic_optimization=False.*layer.compile"),
        (GraphModule, {"strategy": Staged()}, "pipeline_parallel_size=2 runs stages by a schedule"),
    ],
)
def test_layers_that_no_graph_compiles_are_refused_at_the_start(
    module: Any, options: Any, message: str
) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        fit(callback(compile_layers=True, require=False), module=module(), **options)


def test_without_a_device_the_message_says_that_layers_are_not_compiled_either(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        fit(callback(compile_layers=True, require=False, backend=Unavailable()), max_steps=1)
    assert "no CUDA device, and compile_layers=True compiles only inside graphs" in caplog.text


def test_batches_of_another_type_are_left_alone() -> None:
    class Plain(GraphModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.model(batch[None], use_cache=False).logits.square().mean()
            return {"loss": loss, "tokens": torch.ones(())}

    data = Repeated([torch.arange(5)] * 4)
    module, _ = fit(callback(require=False), module=Plain(), data=data, max_steps=4)
    assert len(module.outputs) == 4
    with pytest.raises(MisconfigurationException, match="the batches are Tensor"):
        fit(callback(), module=Plain(), data=data, max_steps=4)


@pytest.mark.parametrize("given", [0, (), "many", (8, True)])
def test_numbers_of_sequences_that_cannot_be_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="wanted 'auto', a number of sequences such as 64"):
        CUDAGraphCallback(max_sequences=given)
