"""FP8 with torchao's emulation: real numbers on a CPU, rounded to FP8 and multiplied in high precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.utils.data import DataLoader

from lightning_thd import THDDataModule
from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.callbacks.cuda_graph import CaptureError
from lightning_thd.cuda_graph.buckets import choose
from lightning_thd.precision import FP8Precision, convert_linear, fastest_precision, fp8_report
from lightning_thd.precision.convert import is_converted
from lightning_thd.precision.recipes import KNOWN_RECIPES
from lightning_thd.precision.report import fp8_share
from tests.cuda_graph.support import BUCKETS, gradients, graphed, padded_eager, random_batch
from tests.precision.runs import DATA, Module, fit, llama, mixtral

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao", "ignore::UserWarning:torchao")


def emulated(recipe: Any = "tensorwise", **settings: Any) -> FP8Precision:
    return FP8Precision(recipe, engine="torchao", emulate=True, **settings)


@pytest.mark.parametrize(
    "recipe", ["rowwise_with_gw_hp", *(pytest.param(x, marks=pytest.mark.slow) for x in RECIPES[:2])]
)
def test_a_packed_fit_follows_bf16_and_every_batch_is_aligned(tmp_path: Path, recipe: str) -> None:
    plain = Module(llama())
    low = Module(llama())
    fit(tmp_path, plain, None, steps=8, precision="bf16-true")
    trainer = fit(tmp_path, low, emulated(recipe), steps=8)
    assert trainer.precision == f"fp8-torchao-{recipe}"
    assert low.losses == pytest.approx(plain.losses, rel=0.02)
    assert low.losses != plain.losses
    assert any(slots % 16 for slots in plain.slots)
    for slots in low.slots:
        Alignment.for_(recipe="tensorwise").check(slots)
    assert low.model.lm_head.weight is low.model.model.embed_tokens.weight


def test_a_mixture_of_experts_keeps_its_router_and_says_what_stays(tmp_path: Path) -> None:
    module = Module(mixtral())
    plugin = emulated()
    fit(tmp_path, module, plugin, steps=2)
    assert plugin.converted is not None
    kept = plugin.converted.kept
    assert kept["model.lm_head"] == "keep='lm_head'"
    assert any(name.endswith("experts") and "grouped products" in why for name, why in kept.items())
    assert not any("gate" in name or "router" in name for name in plugin.converted.names)
    report = fp8_report(module)
    assert all(words in str(report) for words in ("grouped products", "torchao tensorwise"))
    assert 0 < report.share < 0.5  # the experts are most of it


def test_the_share_leaves_out_the_head_and_gradients_in_high_precision() -> None:
    model = llama()
    convert_linear(model, recipe="rowwise_with_gw_hp", engine="torchao", emulate=True, keep="*.0.*")
    share = pytest.approx(1 - 1 / model.config.num_hidden_layers)
    assert (1.5 * fp8_share(model), fp8_share(model, "forward")) == (share, share)
    assert fp8_share(model.requires_grad_(False)) == share  # frozen weights have no gradients


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
def test_conversion_shares_weights_modes_and_every_kind_of_hook() -> None:
    events: dict[bool, list[str]] = {}
    for low in (False, True):
        model = llama(tie_word_embeddings=False)
        seen = events.setdefault(low, [])
        layer = model.model.layers[0].mlp.up_proj.eval()
        layer.register_forward_pre_hook(lambda *_, seen=seen: seen.append("before"), with_kwargs=True)
        layer.register_forward_hook(lambda *_, seen=seen: seen.append("after"), always_call=True)
        layer.register_full_backward_pre_hook(lambda *_, seen=seen: seen.append("backward before"))
        layer.register_full_backward_hook(lambda *_, seen=seen: seen.append("backward"))
        layer.register_state_dict_pre_hook(lambda *_, seen=seen: seen.append("saved"))
        layer.register_load_state_dict_pre_hook(lambda *_, seen=seen: seen.append("loading"))
        layer.register_load_state_dict_post_hook(lambda *_, seen=seen: seen.append("loaded"))
        model.model.layers[1].mlp.up_proj.register_backward_hook(lambda *_, seen=seen: seen.append("old"))
        layer.weight.register_hook(lambda grad, seen=seen: seen.append("gradient"))
        handle = layer.register_forward_hook(lambda *_, seen=seen: seen.append("removed later"))
        before = dict(model.named_parameters())
        if low:
            assert len(convert_linear(model, engine="torchao", emulate=True).names) == 14
            assert not model.model.layers[0].mlp.up_proj.training
        assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
        model(torch.arange(16)[None], use_cache=False).logits.sum().backward()
        handle.remove()
        model(torch.arange(16)[None], use_cache=False)
        model.load_state_dict(model.state_dict())

    assert len(set(events[False])) == 10
    assert events[True] == events[False]


def test_one_layer_under_two_names_stays_one() -> None:
    first = nn.Linear(32, 32)
    model = nn.Sequential(first, nn.Sequential(first, nn.Linear(32, 16)), first)
    converted = convert_linear(model, engine="torchao", emulate=True)
    assert model[0] is model[1][0] is model[2]
    assert (is_converted(model[0]), converted.names) == (True, ("0", "1.1"))


def test_a_model_on_the_meta_device_stays_there() -> None:
    with torch.device("meta"):
        model = llama()
    convert_linear(model, engine="torchao", emulate=True)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_layers_are_kept_with_their_reasons() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good = nn.Linear(64, 64)
            self.odd = nn.Linear(64, 40)
            self.small = nn.Linear(16, 16)
            self.lm_head = nn.Linear(64, 64)
            self.named = nn.Linear(64, 64)
            self.asked = nn.Linear(64, 64)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
            self.sub = nn.modules.linear.NonDynamicallyQuantizableLinear(64, 64)
            self.patched = nn.Linear(64, 64)
            self.patched.forward = lambda x: x  # type: ignore[method-assign]
            self.pruned = nn.utils.prune.identity(nn.Linear(64, 64), "weight")

    model = Odd()
    converted = convert_linear(
        model,
        engine="torchao",
        emulate=True,
        keep=("lm_head", "nam*"),
        convert=lambda name, layer: name != "asked",
        min_features=32,
    )
    assert converted.names == ("good",)
    assert {name: why.split(",")[0] for name, why in converted.kept.items()} == {
        "odd": "has 64 inputs and 40 outputs",
        "small": "has 16 features",
        "lm_head": "keep='lm_head'",
        "named": "keep='nam*'",
        "asked": "convert= returned False",
        "normed": "has a parametrization",
        "pruned": "has a parametrization",
        "sub": "is a NonDynamicallyQuantizableLinear",
        "patched": "has a forward of its own",
    }
    assert "bf16: has 64 inputs and 40 outputs, not multiples of 16" in str(fp8_report(model))
    again = convert_linear(model, engine="torchao", emulate=True, keep="lm_head")
    assert again.kept["good"] == "multiplies in FP8 already"


def test_a_loader_of_ones_own_is_refused_at_its_first_odd_batch(tmp_path: Path) -> None:
    batches = [THDBatch.collate([{"input_ids": [1] * 16}]), THDBatch.collate([{"input_ids": [1] * 15}])]
    module = Module(llama())
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="15 slots; wanted a multiple of 16"):
        fit(tmp_path, module, emulated(), data=loader)
    assert len(module.losses) == 1


def test_a_converted_model_aligns_packs_without_a_plugin(tmp_path: Path) -> None:
    model = llama()
    convert_linear(model, engine="torchao", emulate=True)
    data = THDDataModule(DATA, capacity=250)
    data.attach(model=model)
    data.prepare_data()
    data.setup("fit")
    slots = [batch.input_ids.numel() for batch in data.train_dataloader()]
    module = Module(model)
    fit(tmp_path, module, None, steps=3, precision="32-true")  # nor does Lightning need one
    assert len(module.slots) == 3
    assert all(count % 16 == 0 for count in slots + module.slots)


def test_a_plugin_of_another_recipe_than_the_models_is_refused(tmp_path: Path) -> None:
    model = llama()
    convert_linear(model, recipe="tensorwise", engine="torchao", emulate=True)
    module = Module(model)
    with pytest.raises(Exception, match=r"converted to torchao 'tensorwise' .* torchao 'rowwise'.*the same"):
        fit(tmp_path, module, emulated("rowwise"))
    assert module.losses == []
    fit(tmp_path, module, emulated("tensorwise"), steps=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "blockwise", "engine": "torchao"}, "'blockwise'; wanted one of tensorwise, rowwise, row"),
        ({"engine": "cutlass"}, "engine='cutlass'; wanted one of te, torchao"),
        ({"engine": "torchao", "weights_dtype": torch.float16}, "weights_dtype=torch.float16 cannot be"),
        ({"engine": "te", "emulate": True}, "Transformer Engine cannot emulate FP8"),
        ({"recipe": 3, "engine": "torchao"}, "recipe=3 is not a torchao recipe"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FP8Precision(**settings)


def test_half_weights_and_no_gpu_are_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"q_proj.weight is torch.float16: FP8 takes weights in torch.bfloat16 or torch.float32",
    ):
        convert_linear(llama().half(), engine="torchao", emulate=True)
    with (
        mock.patch("torch.cuda.is_available", return_value=False),
        pytest.raises(Exception, match=r"needs a CUDA device of compute capability 8.9.*emulate=True"),
    ):
        convert_linear(llama(), engine="torchao")

    for model, plugin, message in (
        (llama().half(), emulated(), r"is torch.float16: FP8 takes weights in .* that float16 lost"),
        (llama(), FP8Precision("rowwise", engine="torchao"), "training runs on 'cpu'"),
        (llama(), emulated(min_features=4_096), "converted no layer of Module.*min_features"),
    ):
        module = Module(model)
        with pytest.raises(Exception, match=message):
            fit(tmp_path, module, plugin)
        assert module.losses == []


def test_a_command_line_constructs_the_plugin() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Precision, "plugin")
    settings = {"recipe": "tensorwise", "engine": "torchao", "emulate": True, "keep": ["lm_head", "*gate"]}
    settings["weights_dtype"] = "torch.float32"
    config = {"class_path": "lightning_thd.precision.FP8Precision", "init_args": settings}
    instantiate = getattr(parser, "instantiate", parser.instantiate_classes)
    plugin = instantiate(parser.parse_object({"plugin": config})).plugin
    assert (plugin.keep, plugin.weights_dtype) == (("lm_head", "*gate"), torch.float32)


@pytest.mark.parametrize(
    "recipe", ["tensorwise", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES[1:])]
)
def test_a_captured_step_equals_an_eager_one_bit_for_bit(recipe: str) -> None:
    model = llama()
    convert_linear(model, recipe=recipe, engine="torchao", emulate=True)
    step = graphed(model)

    for seed in range(6):
        batch = random_batch(seed)
        bucket, _ = choose(BUCKETS, batch)
        if bucket is None:
            continue
        assert bucket.slots % 16 == 0
        loss = step(batch)
        replayed = gradients(model, loss)
        eager = padded_eager(model, batch, bucket)
        assert torch.equal(loss.detach(), eager.detach())
        torch.testing.assert_close(replayed, gradients(model, eager), rtol=0, atol=0)
        with torch.no_grad():  # so that the next replay finds other numbers, of another size, to scale
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)

    assert step.stats.replays >= 3
    for holder in (model, model.model.layers[0].mlp.up_proj):
        holder.__dict__["_thd_fp8"] = KNOWN_RECIPES["te", "delayed"]
    with pytest.raises(CaptureError, match="follow a history"):
        graphed(model)(random_batch(0))


def test_the_fastest_precision_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fastest_precision() == fastest_precision("cuda") == fastest_precision("mps") == "32-true"
    with pytest.raises(ValueError, match="not a device"):
        fastest_precision("gpu")


def test_a_config_object_is_taken_as_it_is() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    plugin = FP8Precision(config, engine="torchao", emulate=True)
    assert plugin.recipe.config.emulate
    assert (plugin.precision, plugin.recipe.gradients) == ("fp8-torchao-rowwise_with_gw_hp", 2)
    theirs = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=plugin.recipe.config)
    assert "16  FP8\n" in str(fp8_report(theirs))
