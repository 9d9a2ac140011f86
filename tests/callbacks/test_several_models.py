"""MFU of steps that run more than one model, or one model more than once, against sums made by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_thd.batch import THDBatch
from lightning_thd.callbacks.module_flops import ModuleFlops, Passes, find_model
from lightning_thd.callbacks.seen import microbatches
from lightning_thd.flops import FlopsModel, SeqStats
from tests.callbacks.fits import CONFIG, Clock, Memory, Model, loader, monitor, pack, trainer
from tests.flops.families import counted, encoder, meta_model, small_config
from tests.flops.test_backward import _OLD_NAME, TOTAL, checkpoint

SIZES = {"vocab_size": 31, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
SMALL = transformers.LlamaConfig(**SIZES, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
LARGE = transformers.Qwen3Config(**SIZES, hidden_size=24, intermediate_size=40, num_hidden_layers=3)
PACK = pack(5, 3)
PAIR = {"chosen": pack(5, 3), "rejected": pack(7, 1)}


def llama(config: transformers.LlamaConfig = SMALL) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(config).train()


def logits(model: nn.Module, batch: THDBatch) -> Tensor:
    result: Tensor = model(input_ids=batch.input_ids[None], use_cache=False).logits
    return result


def plain_loss(module: Any, batch: THDBatch) -> Tensor:
    return logits(module.policy, batch).mean()


class Step(L.LightningModule):
    """Holds models and runs ``loss`` on them; every step takes half a second."""

    def __init__(self, clock: Clock, loss: Callable[[Any, Any], Tensor], **models: nn.Module) -> None:
        super().__init__()
        self.clock = clock
        self.loss = loss
        for name, model in models.items():
            setattr(self, name, model)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.sleep(0.5)
        return self.loss(self, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.sleep(0.5)
        logits(self.policy, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.01)


def flops_of_step(
    tmp_path: Path, loss: Callable[[Any, Any], Tensor], batch: Any, **models: nn.Module
) -> float:
    clock = Clock()
    memory = Memory()
    run = trainer(tmp_path, monitor(clock), logger=memory)
    run.fit(Step(clock, loss, **models), loader([batch] * 4))
    first, last = (row["train/device/flops_per_sec"] for _, row in memory.rows)
    assert first == last  # the step that was watched counts as the others do
    return 0.5 * float(last)


def by_hand(config: Any, *packs: THDBatch, work: str = "training") -> int:
    model = FlopsModel.from_config(config)
    count = model.training_flops if work == "training" else model.forward_flops
    return sum(count(one.stats).model for one in packs)


def dpo(module: Any, batch: dict[str, THDBatch]) -> Tensor:
    """The reference is not frozen: it is run under no_grad, as a copy of the policy often is."""
    with torch.no_grad():
        reference = [logits(module.reference, batch[side]).mean() for side in ("chosen", "rejected")]
    policy = [logits(module.policy, batch[side]).mean() for side in ("chosen", "rejected")]
    return policy[0] - policy[1] - reference[0] + reference[1]


def test_dpo_with_a_reference_under_no_grad(tmp_path: Path) -> None:
    flops = flops_of_step(tmp_path, dpo, PAIR, policy=llama(), reference=llama())
    packs = tuple(PAIR.values())
    expected = by_hand(SMALL, *packs) + by_hand(SMALL, *packs, work="forward")
    assert flops == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("frozen", [True, False])
def test_distillation(tmp_path: Path, frozen: bool) -> None:
    def distil(module: Any, batch: THDBatch) -> Tensor:
        with torch.no_grad():
            target = logits(module.teacher, batch)
        return (logits(module.policy, batch) - target).square().mean()

    teacher = transformers.Qwen3ForCausalLM(LARGE).train().requires_grad_(not frozen)
    flops = flops_of_step(tmp_path, distil, PACK, teacher=teacher, policy=llama())
    assert flops == pytest.approx(by_hand(SMALL, PACK) + by_hand(LARGE, PACK, work="forward"), rel=1e-9)


def test_decoders_whose_share_of_the_tokens_varies_have_no_flops() -> None:
    module: Any = nn.Linear(4, 4)
    module.config = SimpleNamespace(is_encoder_decoder=True)
    flops = ModuleFlops(module, sharded=False)

    def known(length: int) -> bool:
        batch = {name: torch.ones(2, n).long() for name, n in (("input_ids", 8), ("labels", length))}
        flops.begin("train", batch)
        module(torch.ones(16, 4)).sum().backward()
        flops.end("train", microbatches(batch))
        return flops.model("train") is not None

    with pytest.warns(UserWarning, match="the decoder's share of the tokens varies"):
        assert [known(length) for length in (8, 8, 2, 8)] == [True, True, False, False]


def test_a_policy_run_twice_and_a_copy_that_is_never_run(tmp_path: Path) -> None:
    def twice(module: Any, batch: THDBatch) -> Tensor:
        return logits(module.policy, batch).mean() + logits(module.policy, batch).std()

    flops = flops_of_step(tmp_path, twice, PACK, policy=llama(), average=llama())
    assert flops == pytest.approx(2 * by_hand(SMALL, PACK), rel=1e-9)


def test_both_sides_in_one_call_and_a_reference_on_one_of_them(tmp_path: Path) -> None:
    def joined(module: Any, batch: dict[str, THDBatch]) -> Tensor:
        ids = torch.cat([batch["chosen"].input_ids, batch["rejected"].input_ids])[None]
        with torch.no_grad():
            reference = logits(module.reference, batch["chosen"]).mean()
        return module.policy(input_ids=ids, use_cache=False).logits.mean() - reference

    pair = {"chosen": pack(6, 2), "rejected": pack(6, 2)}
    flops = flops_of_step(tmp_path, joined, pair, policy=llama(), reference=llama())
    expected = by_hand(SMALL, *pair.values()) + by_hand(SMALL, pair["chosen"], work="forward")
    assert flops == pytest.approx(expected, rel=1e-9)


def test_a_model_called_below_its_outermost_module(tmp_path: Path) -> None:
    def inner(module: Any, batch: THDBatch) -> Tensor:
        with torch.no_grad():
            module.reference.model(input_ids=batch.input_ids[None], use_cache=False)
        hidden = module.policy.model(input_ids=batch.input_ids[None], use_cache=False).last_hidden_state
        return module.policy.lm_head(hidden).mean()

    flops = flops_of_step(tmp_path, inner, PACK, policy=llama(), reference=llama())
    expected = by_hand(SMALL, PACK) + by_hand(SMALL, PACK, work="forward")
    assert flops == pytest.approx(expected, rel=1e-9)


class Called(Model):
    """The stub of ``fits``, which can be called and compiled within a second."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(input_ids))
        return logits


def test_compiled_models_are_told_apart_too(tmp_path: Path) -> None:
    def teach(module: Any, batch: THDBatch) -> Tensor:
        with torch.no_grad():
            target = module.reference(batch.input_ids)
        flops: Tensor = (module.policy(batch.input_ids) - target).square().mean()
        return flops

    policy: Any = torch.compile(Called(CONFIG), backend="eager")
    reference = Called(CONFIG)
    reference.compile(backend="eager")
    flops = flops_of_step(tmp_path, teach, PACK, policy=policy, reference=reference)
    expected = by_hand(CONFIG, PACK) + by_hand(CONFIG, PACK, work="forward")
    assert flops == pytest.approx(expected, rel=1e-9)


def test_a_reward_model_has_its_own_head(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**SMALL.to_diff_dict(), "num_labels": 1, "pad_token_id": 0})
    model = transformers.LlamaForSequenceClassification(config).train()
    flops = flops_of_step(tmp_path, plain_loss, PACK, policy=model)
    language_head = 6 * 8 * 16 * 31
    score = 6 * 8 * 16 * 1
    assert flops == pytest.approx(by_hand(SMALL, PACK) - language_head + score, rel=1e-9)


@pytest.mark.parametrize("kind", ["BertForTokenClassification", "ModernBertModel"])
def test_an_encoder_without_a_language_head_counts_as_torch_does(kind: str) -> None:
    config = encoder("bert" if kind.startswith("Bert") else "modernbert")[0]
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager")
    ids = torch.ones(1, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids)[0].sum().backward()
    ours = find_model(model)
    assert ours is not None
    stats = SeqStats.from_lengths([32], windows=ours.windows)
    assert ours.training_flops(stats).model == counter.get_total_flops()


@_OLD_NAME
@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert", "ModernBert", "Llama"])
@pytest.mark.parametrize("trained", ["all", "head", "lora"])
def test_a_class_head_counts_as_torch_does(kind: str, trained: str) -> None:
    """Encoders run it once a sequence; PEFT wraps it; on frozen layers its input has no gradient."""
    changes: Any = {"num_labels": 300, "pad_token_id": 0}
    llama_like = transformers.LlamaConfig(**{**SMALL.to_diff_dict(), **changes})
    config = llama_like if kind == "Llama" else encoder(kind.lower())[0]
    for name, value in changes.items():
        setattr(config, name, value)
    model: Any = getattr(transformers, f"{kind}ForSequenceClassification")
    model = model._from_config(config, attn_implementation="eager").train()

    if trained == "head":
        model.base_model.requires_grad_(False)
    elif trained == "lora":
        model.requires_grad_(False)
        inputs = r".*\.(query|key|value|[qkv]_lin|Wqkv|[qkv]_proj)"
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=inputs))

    with FlopCounterMode(display=False) as counter:
        model(torch.ones(2, 32, dtype=torch.long)).logits.sum().backward()
    ours = find_model(model, causal="full")
    assert ours is not None

    stats = SeqStats.from_lengths([32, 32], windows=ours.windows)
    assert ours.training_flops(stats).model == counter.get_total_flops()


def test_validation_counts_what_validation_runs(tmp_path: Path) -> None:
    clock = Clock()
    memory = Memory()
    run = trainer(tmp_path, monitor(clock), logger=memory)
    module = Step(clock, dpo, policy=llama(), reference=llama())
    run.fit(module, loader([PAIR] * 2), loader([PACK] * 3))
    (row,) = [row for _, row in memory.rows if "validate/device/flops_per_sec" in row]
    assert row["validate/device/flops_per_sec"] * 0.5 == pytest.approx(by_hand(SMALL, PACK, work="forward"))


def test_a_frozen_model_runs_forward_only() -> None:
    module = nn.ModuleDict({"policy": llama(), "reference": llama().requires_grad_(False)})
    model = find_model(module)
    assert model is not None
    stats = SeqStats.from_lengths([5, 3])
    flops = model.training_flops(stats)
    forward = FlopsModel.from_config(SMALL).forward_flops(stats).model
    assert flops.model == 4 * forward
    halved = find_model(module, passes={"reference": Passes(0.0, 0.5)})
    assert halved is not None
    assert halved.training_flops(stats).model == pytest.approx(3.5 * forward, rel=1e-3)


def test_checkpointing_of_one_model_is_not_that_of_the_other() -> None:
    policy = llama()
    reference = llama().requires_grad_(False)
    checkpoint(policy, reentrant=True)
    pair = nn.ModuleDict({"policy": policy, "reference": reference})
    both = find_model(pair)
    alone = find_model(policy)
    assert both is not None
    assert alone is not None
    stats = SeqStats.from_lengths([5, 3])
    assert both.training_flops(stats).recompute == alone.training_flops(stats).recompute > 0


def test_a_tower_of_unknown_cost_is_named() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower = {"model_type": "siglip_vision_model", **sizes, "image_size": 28, "patch_size": 14}
    config = transformers.LlavaConfig(text_config=SMALL, vision_config=tower, image_token_index=30)
    with pytest.warns(UserWarning, match="in vision_tower, whose cost is not known: MFU is too low"):
        find_model(transformers.LlavaForConditionalGeneration(config))


def composable(model: Any, *names: str) -> None:
    """Checkpoint modules by torch's composable function, which sets hooks and no attribute."""
    for name in names:
        composable_checkpoint(model.get_submodule(name))


def call_checkpoint(model: Any, *names: str, **options: Any) -> None:
    """Let modules call torch.utils.checkpoint in their forward, as code of one's own does."""
    for name in names:
        module = model.get_submodule(name)
        forward = module.forward

        def run(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            named = functools.partial(forward, **kwargs)
            return torch_checkpoint(named, *args, **options)

        module.forward = run


LAYERS = [f"model.layers.{i}" for i in range(4)]
NOT_REENTRANT = {"use_reentrant": False}
REENTRANT = {"use_reentrant": True}
CHECKPOINTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "composable layers": (lambda model: composable(model, *LAYERS), "early_stop"),
    "composable, every second layer": (lambda model: composable(model, *LAYERS[::2]), "early_stop"),
    "composable MLPs": (lambda model: composable(model, *(f"{x}.mlp" for x in LAYERS)), "early_stop"),
    "composable attention": (
        lambda model: composable(model, *(f"{x}.self_attn" for x in LAYERS)),
        "early_stop",
    ),
    "the model below the head": (lambda model: composable(model, "model"), "full"),
    "the whole model": (lambda model: composable(model, ""), "full"),
    "layers by hand": (lambda model: call_checkpoint(model, *LAYERS, **NOT_REENTRANT), "early_stop"),
    "reentrant layers by hand": (lambda model: call_checkpoint(model, *LAYERS[1:], **REENTRANT), "full"),
    "nothing": (lambda model: None, "none"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_what_backward_runs_again_is_seen_as_torch_counts_it(case: str) -> None:
    change, policy = CHECKPOINTS[case]
    model = meta_model(small_config("llama")).train()
    change(model)
    watched = ModuleFlops(model, sharded=False, causal="full")
    watched.begin("train")
    total = sum(counted(model, TOTAL, backward=True).values())
    watched.end("train", [(SeqStats.from_lengths([TOTAL]), None)])
    flops_model = watched.model("train")
    assert flops_model is not None
    assert flops_model.recompute == policy
    assert flops_model.training_flops(SeqStats.from_lengths([TOTAL])).hardware == total
