"""``CausalLMModule``: compiled layers give the same numbers from one graph, whatever the packs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_thd import THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.module import CausalLMModule, adamw
from tests.ranks import run_ranks
from tests.strategies.jobs import full_parameters
from tests.tiny import largest_error, quiet_trainer, sequences, tiny_llama


def count_graphs() -> int:
    compile_layer = nn.Module.compile  # in eager mode: what is traced is the same, and no C++ is built
    nn.Module.compile = lambda self, **kw: compile_layer(self, backend="eager", **kw)  # type: ignore[method-assign]
    samples = sequences(60)
    batches = [THDBatch.collate(samples[6 * i : 6 * i + 6]) for i in range(10)]
    eager = tiny_llama().eval()
    module = CausalLMModule(tiny_llama(), compile="layers")
    module.configure_model()
    module.configure_model()
    assert module.model is not None
    module.model.load_state_dict(eager.state_dict())
    module.model.eval()
    for batch in batches:
        assert torch.equal(causal_lm_loss(module.model, batch), causal_lm_loss(eager, batch))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_layers_share_one_graph_over_all_packs() -> None:
    # In a process of its own: once a batch was cut for context parallelism, attention breaks graphs.
    assert run_ranks(count_graphs, 1) == [1]


def log_one_step(*lengths: int) -> tuple[float, float]:
    module = CausalLMModule(tiny_llama().double())
    samples = [{"input_ids": list(range(1, 1 + n))} for n in lengths]  # each is a pack
    expected = float(causal_lm_loss(tiny_llama().double(), THDBatch.collate(samples)))
    options: dict[str, Any] = {"accumulate_grad_batches": len(lengths) // 2, "precision": "64-true"}
    trainer = quiet_trainer(max_steps=1, devices=2, strategy="thd_ddp", **options)
    trainer.fit(module, THDDataModule(samples, capacity=32))
    return float(trainer.callback_metrics["train/loss"]), expected


@pytest.mark.parametrize("lengths", [(30, 9), (30, 9, 24, 28)])
def test_the_logged_loss_is_that_of_the_step_on_every_rank(lengths: tuple[int, ...]) -> None:
    for logged, expected in run_ranks(log_one_step, 2, *lengths):
        assert logged == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", torch.float32), ("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)],
)
def test_weights_are_of_the_trainers_precision_not_the_files(
    precision: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    saved = tiny_llama().to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    config = {**saved.config.to_dict(), "dtype": "bfloat16"}
    for module in (CausalLMModule(str(tmp_path)), CausalLMModule(config=config)):
        trainer = quiet_trainer(max_steps=1, precision=precision, gradient_clip_val=0.1)
        trainer.fit(module, THDDataModule(sequences(4), capacity=64))
        assert all(group["fused"] for group in trainer.optimizers[0].param_groups)
        assert {parameter.dtype for parameter in module.parameters()} == {dtype}


def fit_rates(folder: Path, ckpt: Path | None = None, **limits: Any) -> list[float]:
    rates = list[float]()
    note = LambdaCallback(
        on_train_batch_start=lambda t, *_: rates.append(t.optimizers[0].param_groups[0]["lr"])
    )
    trainer = quiet_trainer(**limits, callbacks=[note], default_root_dir=folder)
    module = CausalLMModule(tiny_llama(), lr=1e-3, warmup_fraction=0.1)
    trainer.fit(module, THDDataModule(sequences(40), capacity=64), ckpt_path=ckpt)
    trainer.save_checkpoint(folder / "rates.ckpt")
    return rates


def test_the_rate_is_that_of_the_whole_run_also_after_a_resume_with_more_steps(tmp_path: Path) -> None:
    whole = fit_rates(tmp_path, max_steps=24, max_epochs=-1)
    torch_says = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    rise = torch.optim.lr_scheduler.LinearLR(torch_says, 1 / 3, 1.0, total_iters=2)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(torch_says, 22, eta_min=1e-4)
    both = torch.optim.lr_scheduler.SequentialLR(torch_says, [rise, fall], milestones=[2])
    expected = []

    for _ in range(24):
        expected.append(torch_says.param_groups[0]["lr"])
        torch_says.step()
        both.step()

    assert whole == pytest.approx(expected, rel=1e-9)
    with pytest.raises(
        MisconfigurationException, match="decays its learning rate over all steps.*Set max_steps="
    ):
        fit_rates(tmp_path, max_time="00:00:00:09", max_epochs=-1)

    fit_rates(tmp_path, max_steps=10, max_epochs=-1)
    assert fit_rates(tmp_path, tmp_path / "rates.ckpt", max_steps=24, max_epochs=-1)[1:] == whole[11:]


class Distilled(CausalLMModule):
    """A module of a user's own, one of whose arguments is no plain value."""

    def __init__(self, teacher: nn.Module, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.teachers = [teacher]


@pytest.mark.parametrize("given", ["config", "path", "module", "subclass"])
def test_a_checkpoint_loads_with_its_arguments(given: str, tmp_path: Path) -> None:
    kind, teacher = (Distilled, {"teacher": nn.Linear(1, 1)}) if given == "subclass" else (CausalLMModule, {})
    model = tiny_llama()
    model.save_pretrained(tmp_path / "model")
    named: dict[str, Any] = {"config": model.config.to_dict()}
    if given != "config":
        named = {"model": str(tmp_path / "model") if given == "path" else model}
    module = kind(**teacher, **named, lr=0.007)
    trainer = quiet_trainer(max_steps=1, default_root_dir=tmp_path)
    trainer.fit(module, THDDataModule(sequences(4), capacity=64))
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    if given in ("module", "subclass"):
        with pytest.raises(ValueError, match="got model=None and config=None. Give exactly one"):
            kind.load_from_checkpoint(tmp_path / "a.ckpt", **teacher)
        teacher = {**teacher, "model": tiny_llama()}

    loaded = kind.load_from_checkpoint(tmp_path / "a.ckpt", **teacher)
    assert loaded.lr == 0.007
    assert largest_error(loaded.state_dict(), module.state_dict()) == 0.0

    if given == "config":
        module = CausalLMModule(config={"model_type": "llama", "num_hiden_layers": 1})
        with pytest.raises(ValueError, match="'num_hiden_layers', which LlamaConfig does not read; did you"):
            module.configure_model()


def test_matrices_decay_also_if_fsdp1_has_flattened_them() -> None:
    model: Any = tiny_llama()
    module = CausalLMModule(model)
    module.configure_model()
    matrices = {id(p) for p in module.parameters() if p.ndim == 2}
    for parameter in module.parameters():
        parameter.data = parameter.data.flatten()
    wrapper: Any = nn.Module()
    wrapper._fsdp_wrapped_module = model.model.layers[0]
    model.model.layers[0] = wrapper
    vars(module)["_trainer"] = SimpleNamespace(estimated_stepping_batches=2)
    made: Any = module.configure_optimizers()
    decayed, others = made["optimizer"].param_groups

    assert {id(p) for p in decayed["params"]} == matrices
    assert others["weight_decay"] == 0.0

    model.register_parameter("_flat_param", nn.Parameter(torch.ones(3)))
    with pytest.raises(ValueError, match=r"joined matrices.*Set FSDPStrategy\(use_orig_params=True"):
        module.configure_optimizers()


def write_folder(folder: str) -> dict[str, torch.Tensor]:
    module = CausalLMModule(config=tiny_llama().config.to_dict())
    trainer = quiet_trainer(max_steps=1, strategy="thd_model_parallel", devices=2, default_root_dir=folder)
    trainer.fit(module, THDDataModule(sequences(4), capacity=64))
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    return full_parameters(module)


def test_a_folder_of_sharded_weights_loads_as_a_file_does(tmp_path: Path) -> None:
    expected = run_ranks(write_folder, 2, str(tmp_path))[0]
    loaded = CausalLMModule.load_from_checkpoint(tmp_path / "a.ckpt")
    assert largest_error(full_parameters(loaded), expected) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fused_adamw_steps_as_the_plain_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(40, 30), (30,), (1,), (7, 5, 3)]
    ours, theirs = (
        [torch.nn.Parameter(torch.linspace(-1, 1, math.prod(s)).view(s).to(dtype)) for s in shapes]
        for _ in range(2)
    )
    how = {"lr": 1e-2, "betas": (0.9, 0.95)}
    fused = adamw(ours, **how)
    plain = torch.optim.AdamW(theirs, **how, foreach=False, fused=False)

    assert fused.param_groups[0]["fused"]
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        fused.step()
        plain.step()

    # a different order of the same operations: some units in the last place
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 3e-2}[dtype]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
