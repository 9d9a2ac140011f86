"""TRL's DPO, reward and GRPO trainers with every batch in one pack give TRL's own padded numbers."""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, Qwen3MoeConfig

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.integrations import hf_rows, packed_trainer
from lightning_thd.integrations.hf_rows import REFUSED_FOR_ROWS, pack_rows
from tests.data.chats import PLAIN, make_tokenizer
from tests.ranks import run_ranks
from tests.tiny import checkpoint_activations, largest_error
from tests.wide import nothing_narrower

trl = pytest.importorskip("trl")

STEPS = 2
# Since 1.15 the trainers of pairs and groups ask the model for log-probabilities, which packs can give.
# TRL 1.15 needs Triton for them.
FUSED = hasattr(trl.trainer, "add_fused_lm_head")
RUNS = FUSED and importlib.import_module("trl.trainer.utils")._ChunkedLogProbFunction is not None
WHY = f"TRL {trl.__version__} takes log-probabilities from logits, or needs Triton"
needs_fused = pytest.mark.skipif(not RUNS, reason=WHY)
# TRL's fused head and the balancing loss of experts compute in fp32, over as many tokens as they are given.
OF_TRL = (1e-6, 1e-5)  # of losses, and of what is made of gradients or differences
EXACT = (1e-10, 1e-9)
WORDS = ["a pack", "of rows", "is one", "long row", "and no", "token", "sees", "another", "row at all"]
# Of what a trainer logs, what is time or a name.
UNLIKE = re.compile(r"runtime|per_second|time|flos|memory")


def text(seed: int, words: int) -> str:
    return " ".join(WORDS[(seed * 7 + k * k) % len(WORDS)] for k in range(words))


def rows(kind: str) -> list[dict[str, Any]]:
    found = []
    for i in range(12):
        pair: dict[str, Any] = {"chosen": text(i, 1 + i % 5), "rejected": text(i + 3, 9 - i % 7)}
        found.append(pair | ({"margin": i / 8} if kind == "reward" else {"prompt": text(i + 1, 1 + i % 4)}))
    return [{"prompt": row["prompt"]} for row in found] if kind == "grpo" else found


def model_of(kind: str, tokenizer: Any, attention: str, **changes: Any) -> Any:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    config = (Qwen3MoeConfig if kind == "moe" else LlamaConfig)(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
        num_labels=1,
        **(moe if kind == "moe" else {}),
        **changes,
    )
    torch.manual_seed(0)
    auto = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    made = auto.from_config(config, attn_implementation=attention, experts_implementation="eager")
    return made.double()


def reward_long(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


class ExactHead:
    """What TRL's fused head computes, in the dtype it is given: its own sums are fp32, tile by tile."""

    @staticmethod
    def apply(hidden: Any, weight: Any, bias: Any, labels: Any, temperature: float, *others: Any) -> Any:
        logp = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        logits, found = torch.nn.functional.linear(hidden, weight, bias), logp.gather(-1, labels[:, None])
        return found[:, 0], entropy, None, logits.mean(-1).detach(), logits.argmax(-1) == labels


def exact_balance(gates: Any, experts: int, top_k: int, mask: Any = None) -> torch.Tensor:
    """Compute transformers' balancing loss of experts, whose own sums are fp32."""
    rows = torch.cat([gate if mask is None else gate[mask.reshape(-1).bool()] for gate in gates])
    probabilities = rows.softmax(-1)
    chosen = torch.nn.functional.one_hot(probabilities.topk(top_k, -1).indices, experts).sum(1)
    return experts * (chosen.to(rows).mean(0) * probabilities.mean(0)).sum()


def use_exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral import modeling_mixtral
    from trl.trainer import utils

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", ExactHead)
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", exact_balance)


def train(kind: str, packed: bool, out: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train with TRL's own trainer, or with the same one on packs."""
    warnings.simplefilter("ignore")
    tokenizer = make_tokenizer(PLAIN)
    options = dict(options)
    lora, experts = options.pop("lora", False), options.pop("experts", False)
    wide = "share_prefixes" in options  # norms in fp32 round gradients before they are summed
    ours = {"share_prefixes": True} if options.pop("share_prefixes", False) and packed else {}
    patch = pytest.MonkeyPatch()
    if options.pop("exact", False):
        use_exact_sums(patch)
    name = {"dpo": "DPO", "reward": "Reward", "grpo": "GRPO"}[kind]
    trainer_class = getattr(trl, f"{name}Trainer")
    given: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    given |= {"logging_steps": 1, "save_strategy": "no", "adam_epsilon": 1e-3, "report_to": []}
    if kind == "grpo":
        given |= {"num_generations": 2, "max_completion_length": 8, "beta": 0.1}
    args = getattr(trl, f"{name}Config")(
        output_dir=out, use_cpu=True, bf16=False, disable_tqdm=True, **{**given, **options}
    )
    others: dict[str, Any] = {"processing_class": tokenizer, "train_dataset": Dataset.from_list(rows(kind))}
    if kind == "grpo":
        others |= {"reward_funcs": reward_long}
    else:
        others |= {"eval_dataset": Dataset.from_list(rows(kind)[:5])}
    if lora:
        from peft import LoraConfig

        torch.manual_seed(1)
        others["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    folder = f"{out}/model"  # DPO and GRPO build their reference model from it
    if dist.get_rank() == 0:
        model_of("moe" if experts else kind, tokenizer, "sdpa").save_pretrained(folder)
    dist.barrier()
    auto = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    chosen = {"attn_implementation": "thd" if packed else "sdpa", "experts_implementation": "eager"}
    model = auto.from_pretrained(folder, dtype=torch.float64, **chosen)
    if experts:  # TRL would build its reference with grouped products, which know no fp64
        others["ref_model"] = auto.from_pretrained(folder, dtype=torch.float64, **chosen)
    made = packed_trainer(trainer_class) if packed else trainer_class
    running = made(model=model, args=args, **others, **ours)
    with nothing_narrower() if wide else contextlib.nullcontext():
        running.train()
        if kind != "grpo":
            running.evaluate()
    logs = [
        {key: float(value) for key, value in entry.items() if not UNLIKE.search(key)}
        for entry in running.state.log_history
    ]
    patch.undo()
    return {"logs": logs, "params": {n: p.detach().clone() for n, p in running.model.named_parameters()}}


def both(kind: str, out: str, options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    other = "share_prefixes" in options  # compare packs with and without, else packs and padded rows
    options_of_other = {**options, "share_prefixes": False} if other else options
    return train(kind, True, f"{out}/packed", options), train(kind, other, f"{out}/rows", options_of_other)


def check(kind: str, folder: Path, world: int = 1, to: tuple[float, float] = OF_TRL, **options: Any) -> None:
    losses_to, others_to = to
    if kind != "reward" and not RUNS:
        pytest.skip(WHY)
    for found, wanted in run_ranks(both, world, kind, str(folder), options):
        assert len(found["logs"]) >= STEPS
        for own, theirs in zip(found["logs"], wanted["logs"], strict=True):
            assert own.pop("grad_norm", 0.0) == pytest.approx(theirs.pop("grad_norm", 0.0), rel=others_to)
            for name in [name for name in own if name.endswith("loss")]:
                assert own.pop(name) == pytest.approx(theirs.pop(name), rel=losses_to, abs=losses_to)
            assert own == pytest.approx(theirs, rel=others_to, abs=others_to)  # differences of large sums
        assert largest_error(found["params"], wanted["params"]) < others_to


@pytest.mark.parametrize("kind", ["dpo", "reward", pytest.param("grpo", marks=pytest.mark.slow)])
def test_losses_metrics_and_weights_are_those_of_padded_rows(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dpo", {}),
        *(
            pytest.param(kind, {"max_steps": 10, "world": world}, marks=pytest.mark.slow)
            for kind, world in (("dpo", 1), ("grpo", 1), ("reward", 1), ("dpo", 2))
        ),
    ],
)
def test_shared_prefixes_change_nothing(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    check(kind, tmp_path, to=EXACT, share_prefixes=True, exact=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": ["ipo"], "ld_alpha": 0.5},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        {"use_weighting": True},
        {"precompute_ref_log_probs": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"lora": True},
        {"experts": True, "router_aux_loss_coef": 0.1, "exact": True, "to": EXACT},
        {"exact": True, "to": EXACT},
        {"world": 2},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_dpo_mean_what_they_mean(options: dict[str, Any], tmp_path: Path) -> None:
    check("dpo", tmp_path, **options)


@needs_fused
def test_what_would_change_the_numbers_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    trainer: Any = object.__new__(packed_trainer(trl.DPOTrainer))
    for option, why in REFUSED_FOR_ROWS.items():
        trainer.args = SimpleNamespace(**{option: True})
        with pytest.raises(ValueError, match=re.escape(f"({option}=True) {why}. Leave it at its default.")):
            trainer._refuse_what_rows_cannot()
    with caplog.at_level("INFO"):
        trainer.args = SimpleNamespace(pad_to_multiple_of=8)
        trainer._refuse_what_rows_cannot()
    assert "pad_to_multiple_of=8 has no effect on packs, which hold no padding" in caplog.text
    for kind, given, message in (
        (trl.DPOTrainer, {"capacity": 64}, "PackedDPOTrainer got capacity, but a batch of"),
        (trl.GRPOTrainer, {"router_balance": "step"}, "got router_balance, but TRL averages over"),
    ):
        with pytest.raises(TypeError, match=message):
            packed_trainer(kind)(model=None, args=None, **given)
    model = model_of("reward", make_tokenizer(PLAIN), "sdpa")
    pack_rows(model)
    ids = torch.arange(1, 9).view(2, 4)
    with pytest.raises(ValueError, match=r"got pixel_values beside padded rows, and packed_trainer packs"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=ids)


@pytest.mark.parametrize("name", ["DPOTrainer", "GRPOTrainer"])
def test_trainers_of_an_older_trl_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if FUSED:
        monkeypatch.setattr(hf_rows, "_has_fused_head", lambda: False)
    with pytest.raises(ValueError, match=rf"packed_trainer\({name}\) needs TRL 1.15 or newer, and "):
        packed_trainer(getattr(trl, name))
    packed_trainer(trl.RewardTrainer)


@pytest.mark.filterwarnings("ignore")
@needs_fused
def test_a_model_goes_on_to_another_trainer_or_loss(tmp_path: Path) -> None:
    tokenizer, data = make_tokenizer(PLAIN), Dataset.from_list(rows("dpo"))
    args = trl.DPOConfig(str(tmp_path), use_cpu=True, bf16=False, max_steps=1, save_strategy="no")
    models = [model_of("dpo", tokenizer, "thd") for _ in range(2)]
    for share in (False, True):
        given = {"processing_class": tokenizer, "train_dataset": data, "share_prefixes": share}
        packed_trainer(trl.DPOTrainer)(*models, args, **given).train()
    assert [model._thd_shares_prefixes for model in models] == [True, True]
    fresh, batch = model_of("dpo", tokenizer, "thd"), THDBatch.collate([{"input_ids": [5, 6, 7]}] * 2)
    fresh.load_state_dict(models[0].state_dict())
    found = [(causal_lm_loss(x.eval(), batch), x(**batch.hf_kwargs()).logits) for x in (models[0], fresh)]
    assert all(map(torch.equal, *found))


@needs_fused
def test_another_attention_is_refused_as_for_sft(tmp_path: Path) -> None:
    """Models, references and names; before anything is tokenised."""
    tokenizer, data = make_tokenizer(PLAIN), Dataset.from_list(rows("dpo"))
    model_of("dpo", tokenizer, "thd").save_pretrained(tmp_path)
    thd, other = (model_of("dpo", tokenizer, attention) for attention in ("thd", "sdpa"))
    for models, init in (((other,), None), ((thd, other), None), ((str(tmp_path),), "sdpa")):
        warnings.simplefilter("ignore", FutureWarning)
        args = trl.DPOConfig(str(tmp_path), use_cpu=True, bf16=False)
        args.model_init_kwargs = None if init is None else {"attn_implementation": init}
        with pytest.raises(ValueError, match="runs attn_implementation='sdpa', under which"):
            packed_trainer(trl.DPOTrainer)(*models, args=args, train_dataset=data, processing_class=tokenizer)
    pack_rows(thd)
    assert thd.config._attn_implementation == "thd"
    assert thd._thd_padded_attention == "sdpa"


@needs_fused
def test_a_call_with_shared_prefixes_keeps_its_divisor_and_balances_no_experts() -> None:
    from trl.trainer.utils import add_fused_lm_head

    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0], [5, 6, 7, 0]])
    labels = ids.where((ids != 0) & (ids != 5), -100)
    given = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels, "fused_lm_head": True}
    models = [model_of("moe", make_tokenizer(PLAIN), "sdpa") for _ in range(2)]
    for model, share in zip(models, (False, True), strict=True):
        add_fused_lm_head(model)
        pack_rows(model, share_prefixes=share)
    for further in ({}, {"num_items_in_batch": torch.tensor(5)}):
        plain, shared = (model(**given, **further) for model in models)
        torch.testing.assert_close(shared.log_probs, plain.log_probs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(shared.loss, plain.loss, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="balances its experts over the tokens of a batch"):
        models[1](**given, output_router_logits=True)


def test_other_calls_of_a_packed_model_see_padded_rows() -> None:
    tokenizer = make_tokenizer(PLAIN)
    plain, packing = (model_of("dpo", tokenizer, "sdpa").train() for _ in range(2))
    pack_rows(packing)
    ids = torch.arange(1, 13).view(2, 6) % len(tokenizer)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        for given in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[1:]}):
            kept = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
            found = packing(**given).logits[kept]
            assert torch.equal(found, plain(**given).logits[kept])
            assert found.isfinite().all()
        how: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
        assert torch.equal(packing.generate(ids, **how), plain.generate(ids, **how))
    # A copy, as callbacks that average weights make, is a model of its own.
    copied, batch = copy.deepcopy(packing), {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        before = plain(**batch).logits[mask.bool()]
        packing.get_output_embeddings().weight.zero_()
        assert torch.equal(copied(**batch).logits[mask.bool()], before)
        assert not packing(**batch).logits[mask.bool()].any()
    checkpoint_activations(packing)
    with pytest.raises(ValueError, match="but not for log-probabilities, with gradients"):
        packing(input_ids=ids)
