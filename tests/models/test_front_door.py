"""Every way to a model with "thd": built, switched, in part, by hand, copied, wrapped, compiled."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from benchmarks import families
from benchmarks.families import samples
from lightning_thd.batch import THDBatch
from lightning_thd.loss import causal_lm_loss
from lightning_thd.models import prepare, register_thd
from lightning_thd.models.announce import Announcing
from tests.models.families import build
from tests.models.matrix import relative_error
from tests.models.support import loss_alone, pack

register_thd()
Way = Callable[[Any], Any]
COMPILED = [False, pytest.param(True, marks=pytest.mark.slow)]
LLAVA = ("llava", "LlavaForConditionalGeneration")
GEMMA = ("gemma3", "Gemma3ForConditionalGeneration")
NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def small_pack() -> THDBatch:
    """Build a pack for the models of tests.models.families, whose vocabulary is smaller."""
    return THDBatch.collate([{"input_ids": ids % 60 + 3} for ids in samples()])


def assert_exact(model: Any, stock: Any, call: Way | None = None) -> None:
    """Compare the model's own loss on a pack with the sequences' losses under stock eager attention."""
    batch = pack(pad_to=48)
    labels = batch.input_ids.clone()
    labels[sum(batch.lengths) :] = -100
    got = (model if call is None else call)(**batch.hf_kwargs(), labels=labels[None])
    torch.testing.assert_close(got.loss, loss_alone(stock), rtol=2e-5, atol=0)
    stock.set_attn_implementation("eager")
    want = [stock(input_ids=ids[None]).logits[0] for ids in samples()]
    for ours, theirs in zip(batch.unpack(got.logits), want, strict=True):
        assert relative_error(ours, theirs) <= 2e-5


def called(model: Any, compiled: bool = True) -> Any:
    """Return what a test calls: the model, or a fresh compilation of it."""
    torch._dynamo.reset()
    return torch.compile(model, backend="eager") if compiled else model


def switched(family: str, name: str, *attentions: Any) -> Any:
    model = families.build(family, name, "eager")
    for attention in attentions:
        model.set_attn_implementation(attention)
    return model


# What a user may ask for, each of which gives the language model "thd".
ASKED: dict[str, tuple[Any, ...]] = {
    "text": ({"text_config": "thd"},),
    "whole": ({"": "thd", "text_config": "thd"},),
    "there and back": ("thd", {"text_config": "eager"}, {"text_config": "thd"}),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_language_model_with_thd_gives_it_to_the_models_around_it(asked: str) -> None:
    family = GEMMA if asked == "whole" else LLAVA
    assert_exact(switched(*family, *ASKED[asked]), families.build(*family, "eager"))


HALVES: dict[str, Way] = {
    "named": lambda model: model.set_attn_implementation({"": "thd", "text_config": "eager"}),
    "part": lambda model: (
        model.set_attn_implementation("thd"),
        model.model.language_model.set_attn_implementation("eager"),
    ),
    "by hand": lambda model: (
        model.set_attn_implementation("thd"),
        setattr(model.config.text_config, "_attn_implementation", "eager"),
    ),
}


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("way", HALVES)
def test_a_language_model_without_thd_inside_one_with_it_is_refused(way: str, compiled: bool) -> None:
    model = families.build(*LLAVA, "eager")
    HALVES[way](model)
    call = called(model, compiled)
    with pytest.raises(
        ValueError, match=r"got a pack, and its language model runs attn_implementation='eager'"
    ):
        call(**pack().hf_kwargs())


@NON_LEAF
@pytest.mark.parametrize("compiled", COMPILED)
def test_a_model_whose_config_is_changed_by_hand_is_refused_until_it_is_prepared(compiled: bool) -> None:
    model = build("llama", "eager").eval()
    batch = small_pack()
    model.config._attn_implementation = "thd"  # type: ignore[union-attr]
    call = called(model, compiled)
    with pytest.raises(
        ValueError, match=r"LlamaAttention .* not prepared for packs: .*models\.prepare\(model\)"
    ):
        call(**batch.hf_kwargs())
    assert prepare(model) is model
    want: Any = build("llama", "thd").eval()
    got = called(model, compiled)(**batch.hf_kwargs(), labels=batch.input_ids[None])
    assert torch.equal(got.logits, want(**batch.hf_kwargs()).logits)


def test_a_family_without_attention_whose_config_is_changed_by_hand_is_prepared_by_the_loss() -> None:
    model = build("mamba2", "eager")
    batch = small_pack()
    model.config._attn_implementation = "thd"  # type: ignore[union-attr]
    assert torch.equal(causal_lm_loss(model, batch), causal_lm_loss(build("mamba2", "thd"), batch))


def test_a_part_that_is_switched_prepares_the_model_around_it() -> None:
    stock, model = (families.build("llama", "LlamaForCausalLM", "eager") for _ in range(2))
    model.model.set_attn_implementation("thd")
    assert_exact(model, stock)


AROUND = r"LlavaForConditionalGeneration was not prepared for packs, and holds a LlamaModel with 'thd'"


def llava_around_thd(way: str) -> Any:
    """Build a stock model, or a copy of one, and put a language model with "thd" into it."""
    outer = families.build(*LLAVA, "eager")
    if way == "copied":
        outer = copy.deepcopy(outer)
    outer.model.language_model = families.build(*LLAVA, "thd").model.language_model
    if way == "copied afterwards":
        outer = copy.deepcopy(outer)
    return outer


@NON_LEAF
@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("way", ["built", "copied", "copied afterwards"])
def test_a_stock_model_around_a_language_model_with_thd_is_refused(way: str, compiled: bool) -> None:
    model = llava_around_thd(way)
    batch = pack()
    with pytest.raises(ValueError, match=AROUND):
        called(model, compiled)(**batch.hf_kwargs(), labels=batch.input_ids[None])


@pytest.mark.parametrize("way", ["built", "copied"])
def test_a_stock_model_around_a_language_model_with_thd_is_exact_once_it_is_switched(way: str) -> None:
    model = llava_around_thd(way)
    stock = families.build(*LLAVA, "eager")
    model.load_state_dict(stock.state_dict())
    with pytest.raises(ValueError, match=r"\w+ was not prepared for packs, and holds a \w+ with 'thd'"):
        prepare(model)
    model.set_attn_implementation("thd")
    assert_exact(model, stock)


def test_a_classifier_around_a_model_that_works_on_packs_is_refused() -> None:
    model = families.build("llama", "LlamaForSequenceClassification", "eager")
    model.model = transformers.LlamaModel._from_config(copy.deepcopy(model.config), attn_implementation="thd")
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification was not prepared for packs"):
        model(**pack().hf_kwargs())


def test_a_stock_model_keeps_its_class_beside_one_with_thd() -> None:
    stock, model = (build("llama", name).eval() for name in ("eager", "thd"))
    assert type(stock) is transformers.LlamaForCausalLM
    assert type(stock).forward is transformers.LlamaForCausalLM.forward
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {type(layer) for layer in stock.modules()} & {Announcing} == set()


PAST: dict[str, Way] = {
    "forward": lambda model: model.forward,
    "class": lambda model: lambda **kwargs: type(model).forward(model, **kwargs),
    "deep copy": lambda model: copy.deepcopy(model).forward,
    "super": lambda model: _SubForCausalLM.of(model),
}


class _SubForCausalLM(transformers.LlamaForCausalLM):
    @classmethod
    def of(cls, model: Any) -> Any:
        mine = cls._from_config(model.config, attn_implementation="thd")
        mine.load_state_dict(model.state_dict())
        return mine.eval().forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("way", [*PAST, pytest.param("forward compiled", marks=pytest.mark.slow)])
def test_a_forward_called_past_the_hooks_announces_the_pack_itself(way: str) -> None:
    name = ("llama", "LlamaForCausalLM")
    model = families.build(*name, "thd")
    call = PAST.get(way, lambda model: called(model.forward))
    assert_exact(model, families.build(*name, "eager"), call(model))


def test_arguments_given_by_position_are_looked_at_too() -> None:
    stock, model = (families.build("llama", "LlamaForCausalLM", x) for x in ("eager", "thd"))
    batch = pack()
    kwargs = batch.hf_kwargs()
    ids = kwargs.pop("input_ids")
    positions = kwargs.pop("position_ids")
    kwargs = {name: value for name, value in kwargs.items() if name not in ("use_cache", "attention_mask")}
    labels = batch.input_ids[None]
    got = model(ids, None, positions, None, None, labels, **kwargs)

    torch.testing.assert_close(got.loss, loss_alone(stock), rtol=2e-5, atol=0)
    assert torch.equal(model(ids, None, positions).logits, got.logits)  # a pack by its positions
    assert torch.equal(model(ids, None, positions.to(torch.uint16)).logits, got.logits)
    with pytest.raises(ValueError, match=r"got a pack and an attention_mask"):
        model(ids, torch.ones_like(ids), positions, **kwargs)
    with pytest.raises(TypeError, match="multiple values"):
        model(ids, input_ids=ids, position_ids=positions, **kwargs)


def test_layers_of_an_unpickled_model_know_packs() -> None:
    model: Any = build("mamba2", "thd").eval()
    batch = small_pack()
    stock = build("mamba2", "eager").eval()
    want = model(**batch.hf_kwargs()).logits
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(**batch.hf_kwargs()).logits, want)
    assert type(twin.backbone.layers[0].mixer) is type(model.backbone.layers[0].mixer)
    assert type(stock.backbone.layers[0].mixer) is not type(twin.backbone.layers[0].mixer)  # type: ignore[union-attr, index]


TWINS: dict[str, Way] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: _saved(model),
    "moved": lambda model: model.to("meta").to_empty(device="cpu").to(torch.float64),
    "shared config": lambda model: type(model)(model.config),
}


def _saved(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "asked"), [("pickle", {"text_config": "thd"}), *((way, "thd") for way in TWINS)]
)
def test_twins_of_a_model_mask_their_labels_too_compiled_before_the_first_call(way: str, asked: Any) -> None:
    stock = families.build(*LLAVA, "eager")
    twin = TWINS[way](switched(*LLAVA, asked)).float().eval()
    gc.collect()
    twin.load_state_dict(stock.state_dict())
    for x in (twin, stock):  # buffers of ropes are no weights
        x.model.language_model.rotary_emb = copy.deepcopy(stock.model.language_model.rotary_emb)
    assert_exact(twin, stock, called(twin))


ONE_ROW = {
    "bert": ("BertModel", {"return_dict": False}, r"one row of output 1"),
    "gpt2": ("GPT2DoubleHeadsModel", {}, r"one row of mc_logits"),
}


@NON_LEAF
@pytest.mark.parametrize(
    ("family", "compiled"),
    [
        *((family, False) for family in ONE_ROW),
        ("gpt2", True),
        pytest.param("bert", True, marks=pytest.mark.slow),
    ],
)
def test_stock_heads_of_one_row_are_refused_compiled_or_not(family: str, compiled: bool) -> None:
    name, labels, message = ONE_ROW[family]
    model = families.build(family, name, "thd")
    with pytest.raises(ValueError, match=message):
        called(model, compiled)(**pack().hf_kwargs(), **labels)
