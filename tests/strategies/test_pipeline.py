"""Steps through a pipeline of stages give the parameters, losses and logs of one process."""

from __future__ import annotations

import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchmetrics import Metric

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
    family_model,
    full_parameters,
    make_optimizer,
    make_trainer,
    train,
    train_by_hand,
)
from tests.tiny import sequences


@pytest.mark.parametrize(
    ("family", "layout", "step"),
    [
        ("qwen3@2t", Layout(pp=2, dp=2), Packs(6)),
        # One microbatch is fewer than the four stages, which only wait longer.
        ("qwen3@4", Layout(pp=2, options=INTERLEAVED), Packs(1)),
        # Its layers return a pair.
        pytest.param("bamba", Layout(pp=2), Sequences(12), marks=pytest.mark.slow),
        # It asks for its head's weight.
        pytest.param("mamba2", Layout(pp=2), Packs(2), marks=pytest.mark.slow),
    ],
)
def test_parameters_equal_one_process(family: str, layout: Layout, step: Packs | Sequences) -> None:
    tolerance = {"bamba": 1e-6, "mamba2": 1e-5}.get(family, 1e-10)  # scans in fp32
    ranks = run_ranks(train, layout.world, family, layout, step, timeout_s=400.0)
    check_stages(ranks, train_by_hand(family, layout, step), tolerance)


def save_and_go_on(layout: Layout, folder: str, resume: bool) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    module = Job("qwen3@4t")
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    options = {"callbacks": [] if resume else [saver], "enable_checkpointing": not resume}
    trainer = make_trainer(layout, max_steps=6, **options)
    trainer.fit(module, data(Sequences(12)), ckpt_path=f"{folder}/step=3.ckpt" if resume else None)
    if not resume:
        trainer.strategy.save_pretrained(f"{folder}/exported")
    return {"losses": module.losses, "params": full_parameters(module.model)}


@pytest.mark.slow
def test_checkpoints_go_on_in_any_other_layout(tmp_path: Path) -> None:
    first = str(tmp_path / "pp")
    second = str(tmp_path / "dp")
    behind = Layout(pp=2, options={**INTERLEAVED, "asynchronous_checkpoints": True})
    stages = run_ranks(save_and_go_on, 2, behind, first, False)

    assert all(rank["losses"] == stages[0]["losses"] for rank in stages)
    params = {name: value for rank in stages[::-1] for name, value in rank["params"].items()}

    for folder, layout in ((first, Layout(dp=2)), (first, Layout(pp=2, dp=2)), (first, Layout())):
        ranks = run_ranks(save_and_go_on, layout.world, layout, folder, True)
        mean = [sum(losses) / len(ranks) for losses in zip(*(r["losses"] for r in ranks), strict=True)]
        assert mean == pytest.approx(stages[0]["losses"][3:], rel=1e-10)
        for name, value in ranks[0]["params"].items():
            assert torch.allclose(value, params[name], rtol=1e-9, atol=1e-10), name

    run_ranks(save_and_go_on, 2, Layout(dp=2), second, False)
    again = run_ranks(save_and_go_on, 2, Layout(pp=2), second, True)
    assert again[0]["losses"] == pytest.approx(stages[0]["losses"][3:], rel=1e-10)

    model = transformers.AutoModelForCausalLM.from_pretrained(f"{first}/exported", dtype=torch.float64)
    for name, value in full_parameters(model).items():
        assert torch.equal(value, params[name]), name


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


class Deciding(Decayed):
    """Returns something else for each value of the loss, and no gradient without a value."""

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        scale = float(loss.detach()) / 2
        if scale > 1:
            return loss / scale
        return loss.square() if scale > 0 else loss.detach()


class Adapted(Decayed):
    """Trains LoRA adapters of attention and head."""

    def __init__(self) -> None:
        super().__init__("qwen3@4")
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        how = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        self.model = peft.get_peft_model(self.model, how).double()


def fit(kind: type[Decayed], layout: Layout, times: int = 1) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    module = kind()
    for _ in range(times):
        trainer: Any = make_trainer(layout, max_steps=2)
        trainer.fit(module, data(Sequences(12)))
    params = full_parameters(module.model)
    if kind is Adapted:  # what PEFT reads again has the adapters of all stages
        folder = trainer.strategy.broadcast(tempfile.mkdtemp())
        trainer.strategy.save_pretrained(folder)
        adapters = safetensors.torch.load_file(f"{folder}/adapter_model.safetensors")
        names = {name.replace(".default", ""): name for name in params if "lora_" in name}
        for short, name in names.items():
            assert torch.equal(adapters[short], params[name]), name
    return {"losses": module.losses, "params": params, "norms": module.norms}


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        (Decayed, 2),  # a second Trainer goes on with the stages of the first
        (Deciding, 1),
        *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in (FrozenTie, FrozenStage, Adapted)),
    ],
)
def test_frozen_weights_and_adapters(kind: type[Decayed], times: int) -> None:
    (expected,) = run_ranks(fit, 1, kind, Layout(), times)
    check_stages(run_ranks(fit, 2, kind, Layout(pp=2), times), expected)


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
    (expected,) = run_ranks(measure, 1, kind, Layout())
    assert run_ranks(measure, 2, kind, Layout(pp=2, options=options)) == [expected, expected]


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
    (expected,) = run_ranks(fit_stream, 1, str(tmp_path), Layout())
    for rank in run_ranks(fit_stream, 2, str(tmp_path), Layout(pp=2)):
        assert rank["steps"] == expected["steps"] > 1
        for name, value in rank["params"].items():
            torch.testing.assert_close(value, expected["params"][name], rtol=1e-10, atol=1e-10)


class Penalised(Decayed):
    """Adds a penalty on a weight that only the last stage holds."""

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        penalty = sum(weight.square().sum() for weight in self.model.model.norm.parameters())
        return super().training_step(batch, batch_idx) + penalty


class Scaled(Decayed):
    """Trains a factor of the loss that is no parameter of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones((), dtype=torch.float64, requires_grad=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*self.model.parameters(), self.factor])

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.factor


class Detached(Decayed):
    """Returns its loss without a gradient."""

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).detach()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Penalised,
            r"depends on \['model.model.norm.weight'\] in another way too \(test_pipeline.py:\d+: def",
        ),
        (Scaled, r"depends on \['a tensor of the optimizer'\] in another way too"),
        (Detached, r"of Detached returns a loss without a gradient \(test_pipeline.py:\d+: def"),
    ],
)
def test_a_loss_that_the_model_did_not_make(kind: type[Decayed], message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(fit, 2, kind, Layout(pp=2))


class Total(Metric):
    """A sum that keeps what is not a number, which aggregators of torchmetrics 1.5 refuse or leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.total += value

    def compute(self) -> Tensor:
        return self.total


class Peeking(Job):
    """Uses the loss of a microbatch in ways of which nothing tells the other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.total = Total()
        self.seen: list[float] = []
        self.extras: list[float] = []

    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        loss = causal_lm_loss(self.model, batch)
        self.total.update(loss.detach())
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
    total = float(module.total.total)
    return {"losses": module.losses, "peeked": [total, *module.seen, *module.extras]}


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
    [
        (ByName, "head share is treated as .* on the first"),
        (ThawsByName, "now trained on the first pipeline"),
    ],
)
def test_a_tied_weight_is_treated_alike_on_both_of_its_stages(kind: type[Decayed], message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(fit, 2, kind, Layout(pp=2))


class Reentrant(Job):
    """Balances experts through activation checkpoints that return router logits without a gradient."""

    def __init__(self) -> None:
        super().__init__("qwen3_moe@4")
        self.model.config.output_router_logits = True
        self.model.gradient_checkpointing_enable({"use_reentrant": True})


def test_reentrant_checkpoints_do_not_stop_the_balance_of_a_stage() -> None:
    with pytest.raises(RankError, match="router logits without a gradient"):
        run_ranks(fit, 2, Reentrant, Layout(pp=2))


class Dropping(Job):
    """Drops what its layers give, and draws a number in ``training_step`` that all stages must agree on."""

    def __init__(self, recompute: bool) -> None:
        super().__init__("gpt2")
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=512, resid_pdrop=0.5, attn_pdrop=0.0
        )
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="thd")
        self.model = self.model.double().train()
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.drawn: list[float] = []
        self.masks: list[Tensor] = []

    def configure_model(self) -> None:
        for layer in self.model.transformer.h:
            layer.mlp.dropout.register_forward_hook(lambda m, args, out: self.masks.append(out.eq(0)))

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


def drop(layout: Layout, recompute: bool, seed: int) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    torch.manual_seed(7)
    module = Dropping(recompute)
    torch.manual_seed(seed)
    make_trainer(layout, max_steps=3).fit(module, data(Sequences(12)))
    results = {"losses": module.losses, "params": full_parameters(module.model)}
    return {**results, "drawn": module.drawn, "mask": module.masks[0]}


def drop_all(layout: Layout) -> list[dict[str, Any]]:
    return [drop(layout, *how) for how in ((False, 1), (False, 1), (True, 1), (False, 2))]


@pytest.mark.slow
def test_dropout_is_the_stages_own_and_reproducible() -> None:
    for layout in (Layout(pp=2), Layout(pp=2, options=INTERLEAVED)):
        first, last = run_ranks(drop_all, 2, layout)
        assert not torch.equal(first[0]["mask"], last[0]["mask"])  # both were seeded alike
        for rank in (first, last):
            plain, again, recomputed, other = rank
            assert plain["losses"] == again["losses"] != other["losses"]
            assert recomputed["losses"] == pytest.approx(plain["losses"], rel=1e-10)
            for name, value in plain["params"].items():
                assert torch.equal(value, again["params"][name])
                torch.testing.assert_close(value, recomputed["params"][name], rtol=1e-9, atol=1e-10)
        assert len(set(first[0]["drawn"])) == len(first[0]["drawn"]) > 3
        assert sorted(first[0]["drawn"]) == sorted(last[0]["drawn"])


class Later(Job):
    """Builds its model in ``configure_model``: on the meta device, or of a folder."""

    def __init__(self, family: str, folder: str | None, wrap: bool = False) -> None:
        super().__init__(family)
        self.model: Any = None
        self.family = family
        self.folder = folder
        self.wrap = wrap

    def configure_model(self) -> None:
        if self.model is not None:
            return
        if self.folder is None:
            with torch.device("meta"):
                self.model = family_model(self.family)
        else:
            options = {"attn_implementation": "thd", "experts_implementation": "eager"}
            load = transformers.AutoModelForCausalLM.from_pretrained
            self.model = load(self.folder, dtype=torch.float64, **options).train()
        if self.wrap:
            peft = pytest.importorskip("peft")
            how = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
            self.model = peft.get_peft_model(self.model, how, autocast_adapter_dtype=False)


def fit_later(family: str, folder: str | None, layout: Layout, wrap: bool = False) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    torch.manual_seed(3)
    module = Later(family, folder, wrap)
    if wrap:
        make_trainer(layout, max_steps=2).fit(module, data(Sequences(12)))
    else:
        datamodule = data(Packs(layout.dp), val=sequences(12, seed=3))
        make_trainer(layout).validate(module, datamodule, verbose=False)
    buffers = {name: value for name, value in module.model.named_buffers() if value.is_floating_point()}
    return full_parameters(module.model) | {name: value.clone() for name, value in buffers.items()}


@pytest.mark.parametrize(
    ("family", "wrap", "reads"),
    [
        ("qwen3@4t", False, True),
        pytest.param("qwen3@4t", True, False, marks=pytest.mark.slow),
        *(
            pytest.param(family, False, reads, marks=pytest.mark.slow)
            for family in ("llama@4", "gpt2", "qwen3_moe@4", "lfm2@4", "gemma3@4t", "bamba@4")
            for reads in (False, True)
        ),
    ],
)
def test_weights_drawn_or_read_on_stages_are_those_of_the_whole_model(
    tmp_path: Path, family: str, wrap: bool, reads: bool
) -> None:
    if reads:
        model: Any = family_model(family)
        torch.manual_seed(9)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) / 10)
        model.save_pretrained(tmp_path, max_shard_size="40KB")

    folder = str(tmp_path) if reads else None
    (expected,) = run_ranks(fit_later, 1, family, folder, Layout(), wrap)
    tied = next((name for name in expected if name.endswith(("embed_tokens.weight", "wte.weight"))), "")
    seen: set[str] = set()

    for rank in run_ranks(fit_later, 2, family, folder, Layout(pp=2), wrap):
        of_stage = {name if name in expected else tied: value for name, value in rank.items()}  # the head's
        for name, value in of_stage.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10 * wrap, atol=1e-10 * wrap)
        seen |= of_stage.keys()

    assert seen == expected.keys()
