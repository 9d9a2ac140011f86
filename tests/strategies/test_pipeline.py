"""Steps through a pipeline of stages give the parameters, losses and logs of one process."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import Packs, Sequences, THDBatch, THDModelParallelStrategy, causal_lm_loss
from lightning_thd.strategies.pipeline import require_only_loss
from tests.ranks import RankError, run_ranks
from tests.strategies.jobs import (
    INTERLEAVED,
    STEPS,
    Job,
    Layout,
    check_stages,
    data,
    full_parameters,
    make_trainer,
    train,
    train_by_hand,
)
from tests.tiny import sequences

# What FSDP2 calls: since torch 2.13 under a new name.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def compare(family: str, layout: Layout, step: Packs | Sequences, tolerance: float = 1e-10) -> None:
    wanted = train_by_hand(family, layout, step)
    found = run_ranks(train, layout.world, family, layout, step, timeout_s=400.0)
    check_stages(found, wanted, tolerance)
    assert {rank["steps"] for rank in found} == {STEPS}


@pytest.mark.parametrize(
    ("family", "layout", "step"),
    [
        ("qwen3@2t", Layout(pp=2, dp=2), Packs(6)),
        pytest.param("lfm2@4", Layout(pp=2, dp=2), Packs(6), marks=pytest.mark.slow),
        # Its layers return a pair.
        pytest.param("bamba", Layout(pp=2), Sequences(12), marks=pytest.mark.slow),
        # It asks for its head's weight.
        pytest.param("mamba2", Layout(pp=2), Packs(2), marks=pytest.mark.slow),
    ],
)
def test_parameters_equal_one_process(family: str, layout: Layout, step: Packs | Sequences) -> None:
    compare(family, layout, step, {"bamba": 1e-6, "mamba2": 1e-5}.get(family, 1e-10))  # scans in fp32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pipeline_schedule": "gpipe"}, "'gpipe'; wanted one of 1f1b, interleaved"),
        ({"pipeline_parallel_size": 2, "stages_per_rank": 2}, "'interleaved' takes 2 or more"),
        (INTERLEAVED, "there are no stages. Set pipeline_parallel_size"),
        ({"reshard_after_forward": "never"}, "reshard_after_forward is a str, 'never'; wanted bool"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0; wanted 1 or more"),
    ],
)
def test_arguments_that_contradict_each_other(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        THDModelParallelStrategy(**given)


def evaluate(layout: Layout) -> dict[str, Any]:
    module = Job("qwen3@2t")
    trainer = make_trainer(layout, limit_val_batches=3, val_check_interval=2, max_steps=2)
    datamodule = data(Packs(layout.dp), val=sequences(12, seed=3), predict=sequences(9, seed=4))
    validated = trainer.validate(module, datamodule, verbose=False)[0]
    trainer.fit(module, datamodule)
    after = float(trainer.callback_metrics["val/loss"])
    predicted = trainer.predict(module, datamodule)
    logits = {i: one for batch in predicted for i, one in batch}
    return {"val": validated, "after": after, "logits": logits}


def test_validation_has_the_same_numbers_on_every_stage() -> None:
    single, stages = Layout(), Layout(pp=2)
    (wanted,) = run_ranks(evaluate, 1, single)
    for rank in run_ranks(evaluate, 2, stages):
        assert rank["val"] == pytest.approx(wanted["val"], rel=1e-6)
        assert rank["after"] == pytest.approx(wanted["after"], rel=1e-6)
        assert rank["logits"].keys() == wanted["logits"].keys() == set(range(9))
        for i, one in wanted["logits"].items():
            assert torch.allclose(rank["logits"][i], one, rtol=1e-10, atol=1e-12)


def save_and_go_on(layout: Layout, folder: str, resume: bool) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    module = Job("qwen3@4t")
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = make_trainer(
        layout,
        max_steps=6,
        callbacks=[] if resume else [saver],
        enable_checkpointing=not resume,
    )
    trainer.fit(module, data(Sequences(12)), ckpt_path=f"{folder}/step=3.ckpt" if resume else None)
    if not resume:
        trainer.strategy.save_pretrained(f"{folder}/exported")
    return {"losses": module.losses, "params": full_parameters(module.model)}


@pytest.mark.slow
def test_checkpoints_go_on_in_any_other_layout(tmp_path: Path) -> None:
    first, second = str(tmp_path / "pp"), str(tmp_path / "dp")
    stages = run_ranks(save_and_go_on, 2, Layout(pp=2), first, False)
    assert all(rank["losses"] == stages[0]["losses"] for rank in stages)
    params = {name: value for rank in stages[::-1] for name, value in rank["params"].items()}
    for folder, layout in ((first, Layout(dp=2)), (first, Layout(pp=2, dp=2)), (first, Layout())):
        ranks = run_ranks(save_and_go_on, layout.world, layout, folder, True)
        mean = [sum(found) / len(ranks) for found in zip(*(r["losses"] for r in ranks), strict=True)]
        assert mean == pytest.approx(stages[0]["losses"][3:], rel=1e-10)
        for name, value in ranks[0]["params"].items():
            assert torch.allclose(value, params[name], rtol=1e-9, atol=1e-10), name
    run_ranks(save_and_go_on, 2, Layout(dp=2), second, False)
    again = run_ranks(save_and_go_on, 2, Layout(pp=2), second, True)
    assert again[0]["losses"] == pytest.approx(stages[0]["losses"][3:], rel=1e-10)
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{first}/exported", dtype=torch.float64)
    for name, value in full_parameters(model).items():
        assert torch.equal(value, params[name]), name


class Penalty(Job):
    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        loss = causal_lm_loss(self.model, batch) * 0.5
        for parameter in self.model.parameters():
            loss = loss + parameter.square().sum() * 1e-4
        return loss


class Logits(Job):
    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        return self.model(**batch.hf_kwargs()).logits.square().mean()


class Deciding(Job):
    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        loss = causal_lm_loss(self.model, batch)
        scale = float(loss) / 2
        if scale > 1:
            return loss / scale
        return loss


def fit_with(kind: type[Job]) -> str:
    layout = Layout(pp=2, options={"timeout": timedelta(seconds=20)})
    try:
        make_trainer(layout, gradient_clip_val=None).fit(kind("qwen3@4"), data(Sequences(12)))
    except Exception as err:  # what it is belongs to the test
        return f"{type(err).__name__}: {err}"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Logits, r"Only the last pipeline stage has logits.*\n  test_pipeline.py:\d+: return self.model\("),
        (Deciding, r"by \['DivBackward0'.* on the last .*: it decides by the loss, and only the last stage"),
    ],
)
@pytest.mark.slow
def test_steps_that_stages_cannot_run(kind: type[Job], message: str) -> None:
    found = run_ranks(fit_with, 2, kind, timeout_s=120.0)
    assert any(re.search(message, text, re.DOTALL) for text in found), found
    assert not any("nothing was raised" in text for text in found)


def test_a_loss_that_depends_on_weights_in_another_way() -> None:
    module = Penalty("qwen3")
    weight = module.model.get_output_embeddings().weight
    model_loss = weight.square().sum()
    assert require_only_loss(module, model_loss * 2, [model_loss.grad_fn]) == ("MulBackward0",)
    message = r"depends on \['model.lm_head.weight'\] in another way too \(test_pipeline.py:\d+: def training"
    with pytest.raises(MisconfigurationException, match=message):
        require_only_loss(module, model_loss + weight.sum(), [model_loss.grad_fn])


class Counting(Job):
    """Counts what is called of torch.distributed between ranks while one step runs."""

    NAMES = ("send", "recv", "batch_isend_irecv", "broadcast", "all_reduce", "all_gather")
    OTHERS = ("broadcast_object_list", "all_gather_object", "all_gather_into_tensor", "reduce_scatter_tensor")

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        return causal_lm_loss(self.model, batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls: Counter[str] = Counter()
        self.microbatches = len(batch)
        self.sent = self.trainer.strategy._pipeline.channel.messages
        self.patch = pytest.MonkeyPatch()
        for name in {*self.NAMES, *self.OTHERS, GATHER}:
            self.patch.setattr(dist, name, self.counted(name, getattr(dist, name)))

    def counted(self, name: str, call: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            self.calls[name] += group is None or group.size() > 1
            return call(*args, **kwargs)

        return counting

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.patch.undo()
        self.sent = self.trainer.strategy._pipeline.channel.messages - self.sent


def count_calls(layout: Layout) -> tuple[int, int, dict[str, int]]:
    module = Counting("qwen3@4t")
    make_trainer(layout, max_steps=3).fit(module, data(Sequences(12)))
    return module.microbatches, module.sent, dict(+module.calls)


def test_nothing_travels_but_hidden_states_gradients_losses_and_one_norm() -> None:
    found = run_ranks(count_calls, 2, Layout(pp=2))
    for rank, (n, sent, calls) in enumerate(found):
        assert n > 1
        assert sent == n  # activations down from rank 0, gradients up from rank 1
        assert calls == {
            "batch_isend_irecv": 1,  # the tied weight's gradient
            "all_reduce": 1,  # the norm, to clip
            "broadcast_object_list": 1,  # losses and logs
        }, (rank, calls)


@pytest.mark.slow
def test_weights_are_gathered_once_a_step() -> None:
    once, often = Layout(pp=2, dp=2), Layout(pp=2, dp=2, options={"reshard_after_forward": True})
    for n, _, calls in run_ranks(count_calls, 4, once):
        assert n > 1
        assert calls[GATHER] == 3  # two layers, and the embedding or the norm with the head
    for n, _, calls in run_ranks(count_calls, 4, often):
        assert calls[GATHER] >= 2 * n


class Raising(Job):
    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("out of cheese")
        return super().training_step(batch, batch_idx)


def fit_raising(layout: Layout) -> None:
    make_trainer(layout).fit(Raising("qwen3@4"), data(Sequences(12)))


def test_an_exception_on_one_stage_ends_the_job_with_its_message() -> None:
    with pytest.raises(RankError, match="out of cheese"):
        run_ranks(fit_raising, 2, Layout(pp=2), timeout_s=150.0)
