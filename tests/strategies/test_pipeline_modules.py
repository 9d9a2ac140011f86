"""Modules and Trainers beside the plain ones, in a pipeline: the numbers of one process, or a refusal."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.callbacks import THDThroughputMonitor
from lightning_thd.data.streams import Stream
from lightning_thd.strategies.norms import grad_norm
from tests.data.streams.jobs import write_samples
from tests.ranks import RankError, run_ranks
from tests.strategies.jobs import (
    INTERLEAVED,
    Job,
    Layout,
    check_stages,
    data,
    full_parameters,
    make_optimizer,
    make_trainer,
)
from tests.tiny import sequences


class Decayed(Job):
    """Gives the optimizer frozen weights too, which decay as soon as they get a gradient, even of zero."""

    def __init__(self, family: str = "qwen3@2t") -> None:
        super().__init__(family)
        self.norms: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = make_optimizer(self.model)
        optimizer.param_groups[0]["weight_decay"] = 0.1
        return optimizer

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))


class FrozenTie(Decayed):
    def __init__(self) -> None:
        super().__init__()
        self.model.get_input_embeddings().requires_grad_(False)


class FrozenStage(Decayed):
    """Trains the layers of the last stage alone."""

    def __init__(self) -> None:
        super().__init__("qwen3@4")
        self.model.get_input_embeddings().requires_grad_(False)
        self.model.model.layers[:2].requires_grad_(False)


class Adapted(Decayed):
    """Trains LoRA adapters of attention and head."""

    def __init__(self) -> None:
        super().__init__("qwen3@4")
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        how = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        self.model = peft.get_peft_model(self.model, how).double()


def fit(kind: type[Job], layout: Layout, times: int = 1) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    module = kind()
    for _ in range(times):
        make_trainer(layout, max_steps=2).fit(module, data(Sequences(12)))
    found = {"losses": module.losses, "params": full_parameters(module.model)}
    return {**found, "norms": getattr(module, "norms", [])}


def compare(kind: type[Job], layout: Layout, times: int = 1) -> None:
    (wanted,) = run_ranks(fit, 1, kind, Layout(), times)
    check_stages(run_ranks(fit, layout.world, kind, layout, times), wanted)


def test_a_second_trainer_goes_on_with_the_stages_of_the_first() -> None:
    compare(Decayed, Layout(pp=2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FrozenTie, FrozenStage, Adapted])
def test_frozen_weights_and_adapters(kind: type[Job]) -> None:
    compare(kind, Layout(pp=2))


class Recomputed(Decayed):
    def __init__(self) -> None:
        super().__init__("qwen3@4t")
        self.model.gradient_checkpointing_enable({"use_reentrant": False})


def measure(kind: type[Job], layout: Layout) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    monitor = THDThroughputMonitor(peak=1e12, every_n_steps=2, warmup_steps=0)
    make_trainer(layout, max_steps=2, callbacks=[monitor]).fit(kind(), data(Sequences(12)))
    return {"flops": monitor.state_dict()["flops"], "total": monitor.latest["train/total_flops"]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FrozenStage, Adapted, Recomputed])
@pytest.mark.parametrize("options", [{}, INTERLEAVED], ids=["1f1b", "interleaved"])
def test_flops_are_those_of_the_whole_model_once(kind: type[Job], options: dict[str, Any]) -> None:
    (wanted,) = run_ranks(measure, 1, kind, Layout())
    assert run_ranks(measure, 2, kind, Layout(pp=2, options=options)) == [wanted, wanted]


def fit_stream(folder: str, layout: Layout) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    module = Job("qwen3@2")
    accumulate = 1 if layout.pp > 1 else 3
    trainer = make_trainer(layout, max_epochs=1, max_steps=-1, accumulate_grad_batches=accumulate)
    stream = Stream(source=f"{folder}/*.jsonl", window=8)
    trainer.fit(module, THDDataModule(stream, capacity=64, global_batch=Packs(3)))
    return {"params": full_parameters(module.model), "steps": trainer.global_step}


def test_a_step_of_packs_from_a_stream_is_one_step(tmp_path: Path) -> None:
    write_samples(tmp_path, 32, shards=2)
    (wanted,) = run_ranks(fit_stream, 1, str(tmp_path), Layout())
    for rank in run_ranks(fit_stream, 2, str(tmp_path), Layout(pp=2)):
        assert rank["steps"] == wanted["steps"] > 1
        for name, value in rank["params"].items():
            torch.testing.assert_close(value, wanted["params"][name], rtol=1e-10, atol=1e-10)


class Beside(Job):
    """Trains a weight outside the model."""

    def __init__(self) -> None:
        super().__init__("qwen3@2")
        self.gate = nn.Linear(1, 1, dtype=torch.float64)

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        return causal_lm_loss(self.model, batch) + self.gate.weight.sum()


class SecondOrder(Job):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.model.parameters())


class Clips(Job):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)


def refuse(kind: str) -> str:
    warnings.filterwarnings("ignore")
    layout, options = Layout(pp=2), {}
    made = {
        "beside": Beside,
        "clips": lambda: Clips("qwen3@2"),
        "second order": lambda: SecondOrder("qwen3@2"),
    }
    module: L.LightningModule = made.get(kind, lambda: Job("qwen3@2"))()
    if kind == "averaged":
        options["callbacks"] = [EMAWeightAveraging()]
    try:
        if kind == "accumulated":
            batches = [THDBatch.collate(s) for s in data_samples()]
            loader = torch.utils.data.DataLoader(batches, batch_size=None)
            make_trainer(layout, accumulate_grad_batches=2).fit(module, loader)
            return "nothing was raised"
        if kind == "other sizes":
            make_trainer(layout, max_steps=1).fit(module, data(Sequences(12)))
            layout = Layout(dp=2)
        make_trainer(layout, max_steps=1, **options).fit(module, data(Sequences(12)))
    except Exception as err:  # what it is belongs to the test
        return f"{type(err).__name__}: {err}"
    return "nothing was raised"


def data_samples() -> list[list[dict[str, Tensor]]]:
    samples = sequences(16, labels=True)
    return [samples[i : i + 4] for i in range(0, 16, 4)]


def refuse_all(kinds: list[str]) -> list[str]:
    return [refuse(kind) for kind in kinds]


def test_refusals() -> None:
    wanted = {
        "beside": r"Beside trains \['gate.weight', 'gate.bias'\] beside the Qwen3ForCausalLM",
        "clips": "sees only the gradients of this pipeline stage",
        "averaged": "EMAWeightAveraging under THDModelParallelStrategy: it copies weights",
        "accumulated": "accumulate_grad_batches=2, but a pipeline runs all microbatches of a step",
        "second order": "LBFGS with tensor_parallel_size=1, pipeline_parallel_size=2: it decides by",
        "other sizes": "cut for pipeline_parallel_size=2 with stages_per_rank=1 by an earlier Trainer",
    }
    for rank in run_ranks(refuse_all, 2, list(wanted)):
        for text, pattern in zip(rank, wanted.values(), strict=True):
            assert re.search(pattern, text), text


class Peeking(Job):
    """Uses the loss of a microbatch in ways of which nothing tells the other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric(nan_strategy="disable")
        self.seen: list[float] = []
        self.extras: list[float] = []

    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        loss = causal_lm_loss(self.model, batch)
        self.mean.update(loss.detach())
        return {"loss": loss * 0.5, "doubled": loss.detach() * 2}

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.seen.append(float(loss))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.extras.append(float(outputs["doubled"]))


def peek() -> dict[str, list[float]]:
    warnings.filterwarnings("ignore")
    module = Peeking()
    make_trainer(Layout(pp=2), max_steps=1).fit(module, data(Sequences(8)))
    mean = float(module.mean.mean_value)
    return {"losses": module.losses, "peeked": [mean, *module.seen, *module.extras]}


def test_a_loss_that_a_stage_does_not_have_is_not_a_number() -> None:
    first, last = run_ranks(peek, 2)
    assert first["losses"] == last["losses"]
    assert all(math.isnan(value) for value in first["peeked"])
    assert not any(math.isnan(value) for value in last["peeked"] + last["losses"])


class ByName(Decayed):
    """Groups weights by a name that the tied weight has on the first stage only."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        names = dict(self.model.named_parameters())
        ends = [p for name, p in names.items() if "embed" in name]
        rest = [p for name, p in names.items() if "embed" not in name]
        return torch.optim.AdamW([{"params": ends}, {"params": rest}])


class ThawsByName(FrozenTie):
    """Thaws the embedding, whose head has another name on the last stage, after the first step."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.model.get_input_embeddings().requires_grad_(True)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(ByName, "head share is treated as .* on the first"), (ThawsByName, "trained by now on the first pip")],
)
def test_a_tied_weight_is_treated_alike_on_both_of_its_stages(kind: type[Job], message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(fit, 2, kind, Layout(pp=2))
