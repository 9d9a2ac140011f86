"""FP8 with Transformer Engine, through a double that asserts what the real one asserts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from lightning_thd import Sequences, THDDataModule, THDDDPStrategy, THDModelParallelStrategy, causal_lm_loss
from lightning_thd.callbacks import meter
from lightning_thd.flops import FlopsModel, SeqStats
from lightning_thd.precision import FP8Precision, convert_linear, fp8_report
from lightning_thd.precision import plugin as plugin_module
from lightning_thd.precision.convert import check_strategy, in_low_precision
from lightning_thd.precision.recipes import check_device, resolve
from tests.precision import standins
from tests.precision.runs import DATA, Module, fit, llama
from tests.precision.standins import State
from tests.ranks import pretended_ranks, run_ranks
from tests.tiny import checkpoint_activations

BY_NAME = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> State:
    """The double, on a machine whose CPU passes for the device: what devices can do is tested apart."""
    import peft  # noqa: F401  # it would take the double for the real one, and remember that

    monkeypatch.setattr(plugin_module, "check_device", lambda recipe, device: None)
    monkeypatch.setattr("lightning_thd.precision.convert.check_device", lambda recipe, device: None)
    return standins.install(monkeypatch)


@pytest.mark.parametrize("recipe", BY_NAME)
def test_every_recipe_trains_aligned_packs_in_its_region_and_evaluates_without_the_group(
    tmp_path: Path, te: State, recipe: str
) -> None:
    group = object()
    module = Module(llama(**WIDE))

    class Grouped(FP8Precision):
        """As on several ranks, whose group is that of the job."""

        def forward_context(self) -> Any:
            return self._region(group)

    weights = {id(parameter) for parameter in module.parameters()}
    data = THDDataModule(DATA, capacity=250, val=DATA[:8])
    trainer = fit(tmp_path, module, Grouped(recipe), steps=3, data=data, val_check_interval=3)
    assert trainer.precision == f"fp8-te-{recipe}"
    assert {id(parameter) for parameter in module.parameters()} == weights
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight
    assert type(module.model.lm_head) is nn.Linear
    training = [region for region in te.regions if region[2]]
    evaluation = [region for region in te.regions if not region[2]]
    assert training == [(BY_NAME[recipe], group, True)] * 3
    assert set(evaluation) == {(BY_NAME[recipe], None, False)}
    assert all(te.outside)  # bf16 autocast is on around the region
    assert all(te.calls)
    assert module.losses == sorted(module.losses, reverse=True)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_resumed_run_goes_on_exactly_and_weights_load_both_ways(
    tmp_path: Path, te: State, recipe: str
) -> None:
    whole = Module(llama())
    first = Module(llama())
    second = Module(llama(seed=1))
    plain = list(first.state_dict())
    plugin = FP8Precision(recipe)
    resumed = FP8Precision(recipe)
    fit(tmp_path, whole, plugin, steps=4)
    fit(tmp_path, first, FP8Precision(recipe), steps=2).save_checkpoint(tmp_path / "two.ckpt")
    fit(tmp_path, second, resumed, steps=4, ckpt_path=tmp_path / "two.ckpt")

    assert first.losses + second.losses == whole.losses
    assert list(second.state_dict()) == plain

    llama().load_state_dict(second.model.state_dict())
    second.model.load_state_dict(llama().state_dict())
    histories = resumed.state_dict()
    expected = plugin.state_dict()

    assert len(histories) == len(expected) == (14 if recipe == "delayed" else 0)
    for name, state in expected.items():
        assert state["scaling_fwd"][1].count_nonzero() == 4
        torch.testing.assert_close(histories[name], state, rtol=0, atol=0)


def regions_of_a_rank() -> tuple[list[tuple[str, bool, bool]], list[bool]]:
    """Fit under the double on the ranks there are; whether each region shared its statistics with all."""
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(plugin_module, "check_device", lambda recipe, device: None)
        state = standins.install(monkeypatch)
        data = THDDataModule(DATA, capacity=250, val=DATA[:8])
        settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "val_check_interval": 2}
        fit(Path(folder), Module(llama()), FP8Precision("delayed"), steps=2, data=data, **settings)
    return [(name, group is dist.group.WORLD, taken) for name, group, taken in state.regions], state.calls


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_statistics_are_shared_by_all_ranks_of_a_step_and_by_none_in_evaluation() -> None:
    for regions, calls in run_ranks(regions_of_a_rank, 2):
        assert [region for region in regions if region[2]] == [("DelayedScaling", True, True)] * 2
        assert {region for region in regions if not region[2]} == {("DelayedScaling", False, False)}
        assert all(calls)


def test_a_converted_model_without_the_plugin_is_told_of(tmp_path: Path, te: State) -> None:
    module = Module(llama())
    convert_linear(module.model, recipe="current")
    with pytest.warns(UserWarning, match=r"has no FP8Precision: its layers multiply in high precision"):
        fit(tmp_path, module, None, steps=1)


def test_checkpointed_layers_run_again_in_the_region(tmp_path: Path, te: State) -> None:
    models: list[Any] = [llama() for _ in range(3)]
    plugin = FP8Precision("current")
    fit(tmp_path, Module(models[0]), plugin, steps=1)  # before checkpointing is switched on
    for model in models:
        checkpoint_activations(model)
    fit(tmp_path, Module(models[0]), plugin, steps=2)
    assert len(te.calls) > 2 * 14
    assert all(te.calls)  # in the recomputation too
    with pytest.raises(Exception, match=r"'delayed' with activation checkpointing"):
        fit(tmp_path, Module(models[1]), FP8Precision("delayed"))
    convert_linear(models[2], recipe="current")
    with pytest.raises(ValueError, match=r"would recompute checkpointed activations in bf16"):
        in_low_precision(causal_lm_loss, models[2])


def test_accelerate_runs_a_converted_model_in_its_region(te: State) -> None:
    from accelerate import Accelerator

    from lightning_thd import prepare_thd

    model = llama()
    assert len(convert_linear(model, recipe="current").names) == 14
    data = THDDataModule(DATA, capacity=250, global_batch=Sequences(8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loop = prepare_thd(Accelerator(cpu=True), model, data, optimizer, peak=1e12)
    loop.backward(next(iter(loop.loader)))
    assert te.calls
    assert all(te.calls)
    assert all(rows % 16 == 0 for rows in te.rows)


@pytest.mark.filterwarnings("ignore")
def test_hugging_faces_trainer_runs_a_converted_model_in_its_region(te: State, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from lightning_thd.integrations import packed_trainer

    model = llama()
    convert_linear(model, recipe="current")
    settings: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=2, use_cpu=True, **settings)
    data: dict[str, Any] = {"train_dataset": DATA, "eval_dataset": DATA[:4], "capacity": 250}
    trainer = packed_trainer()(model=model, args=arguments, peak=1e12, **data)
    trainer.train()
    assert te.regions == [("Float8CurrentScaling", None, True)] * 2
    trainer.evaluate()
    assert not te.regions[-1][2]
    assert all(te.calls)
    assert all(rows % 16 == 0 for rows in te.rows)


def test_layers_whose_sizes_do_not_divide_the_blocks_stay(te: State) -> None:
    sizes = {"wide": (256, 128), "narrow": (256, 64), "odd": (48, 32), "odder": (48, 40)}
    for recipe, names in (
        ("current", ("wide", "narrow", "odd")),
        ("blockwise", ("wide",)),
        ("mxfp8", ("wide", "narrow")),
    ):
        model = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
        converted = convert_linear(model, recipe=recipe)
        assert converted.names == names
        assert f"te {recipe}" in str(fp8_report(model))
    assert converted.kept["odder"] == "has 48 inputs and 40 outputs, not multiples of 32"


def test_recipes_of_the_engine_are_taken_as_objects(te: State) -> None:
    import transformer_engine.common.recipe as recipes

    block = recipes.Float8BlockScaling()
    plugin = FP8Precision(block)
    assert (plugin.precision, plugin.recipe.config) == ("fp8-te-blockwise", block)
    assert plugin.alignment(cp=2, tp=2, sequence_parallel=True).total_multiple == 512
    for unknown in (recipes.CustomRecipe(), {"amax_history_len": 16}):
        with pytest.raises(ValueError, match="is not a Transformer Engine recipe whose alignment is known"):
            FP8Precision(unknown)
    with pytest.raises(ValueError, match=r"recipe='rowwise'; wanted one of delayed, .*engine='te'"):
        FP8Precision("rowwise")


def test_models_the_engine_would_run_wrongly_are_refused(te: State) -> None:
    model = llama()
    convert_linear(model, recipe="current")
    with pytest.raises(Exception, match=r"has Transformer Engine layers already \(model.layers.0"):
        convert_linear(model, recipe="current")

    with pretended_ranks(1, backend="gloo"):
        mesh = init_device_mesh("cpu", (1,))
        layer = nn.Linear(32, 32)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh))
        with pytest.raises(Exception, match=r"sharded by FSDP2 or tensor.*\(0.weight\) is not"):
            convert_linear(nn.Sequential(layer), recipe="current")
        later = nn.Sequential(nn.Linear(32, 32))  # sharded once it is converted, as by prepare()
        convert_linear(later, recipe="current")
        later[0].weight = nn.Parameter(distribute_tensor(later[0].weight.detach(), mesh))
        with pytest.raises(Exception, match=r"sharded by FSDP2 or tensor.*\(0.weight\) is not"):
            in_low_precision(causal_lm_loss, later)

    recipe = FP8Precision("current").recipe
    for strategy in (THDModelParallelStrategy(tensor_parallel_size=2), FSDPStrategy()):
        with pytest.raises(Exception, match=r"engine='te' with .*Strategy, which shards .* engine='torchao'"):
            check_strategy(strategy, recipe)
    check_strategy(THDDDPStrategy(), recipe)


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "message"),
    [
        ("current", (8, 0), "12.9", r"capability 8.0; recipe='current' needs 8.9.*bf16"),
        ("blockwise", (8, 9), "12.9", r"needs 9.0. Use recipe='current'"),
        ("blockwise", (9, 0), "12.8", r"needs CUDA 12.9; this torch was built for 12.8"),
        ("mxfp8", (12, 0), "12.9", r"has no 'mxfp8' products from 12.0 on"),
        ("nvfp4", (9, 0), "12.9", r"needs 10.0"),
        ("blockwise", (9, 0), "13.0", None),
        ("mxfp8", (10, 3), "12.9", None),
        ("nvfp4", (12, 0), "12.9", None),
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch, recipe: str, capability: tuple[int, int], cuda: str, message: str | None
) -> None:
    standins.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Test")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    resolved = resolve(recipe, "te")
    device = torch.device("cuda", 0)

    if message is None:
        check_device(resolved, device)
    else:
        with pytest.raises(Exception, match=message):
            check_device(resolved, device)

    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(Exception, match="engine='te' is NVIDIA's. On an AMD GPU .* use engine='torchao'"):
        check_device(resolved, device)


def test_without_the_engine_the_way_to_install_it_is_said() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"engine=.te. .*pip install .*transformer-engine"):
        FP8Precision("current")


def test_mfu_holds_the_share_in_fp8_against_its_own_peak(te: State, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(**WIDE)
    cpu = torch.device("cpu")
    convert_linear(model, recipe="current")
    monkeypatch.setattr(meter, "device_name", lambda _: "NVIDIA H100 80GB HBM3")
    low = meter.low_precision(model, cpu, "auto")
    assert low is not None
    assert low.shares == {"training": 1.0, "forward": 1.0}
    assert low.ratio == pytest.approx(1979 / 989.4)
    flops = FlopsModel.from_config(model.config).training_flops(SeqStats.from_lengths([100]))
    seconds = flops.linear / 1979e12 + (flops.attention + flops.logits) / 989.4e12
    assert flops.model / low.peak(989.4e12, flops, "training") == pytest.approx(seconds)
    assert meter.low_precision(model, cpu, 1e12) is None
    assert meter.low_precision(llama(), cpu, "auto") is None
