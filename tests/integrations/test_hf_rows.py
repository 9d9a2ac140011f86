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
from accelerate import DistributedType
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, Qwen3MoeConfig

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.integrations import hf_rows, packed_trainer
from lightning_thd.integrations.hf_rows import REFUSED_FOR_ROWS, pack_rows, refuse_without_ddp
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
# The reward trainer takes scores, and so runs with every TRL.
NAMES = ["Reward", pytest.param("DPO", marks=needs_fused)]
# TRL's fused head and the balancing loss of experts compute in fp32, over as many tokens as they are given.
OF_TRL = (1e-6, 1e-5)  # of losses, and of what is made of gradients or differences
EXACT = (1e-10, 1e-9)
WORDS = ["a pack", "of rows", "is one", "long row", "and no", "token", "sees", "another", "row at all"]
# Of what a trainer logs, what is time or a name.
UNLIKE = re.compile(r"runtime|per_second|time|flos|memory")


def text(seed: int, words: int) -> str:
    """A text of some words, which differ from seed to seed."""
    return " ".join(WORDS[(seed * 7 + k * k) % len(WORDS)] for k in range(words))


def rows(kind: str) -> list[dict[str, Any]]:
    """Twelve rows for a trainer: pairs with a prompt (dpo) or a margin (reward), or prompts (grpo)."""
    table: list[dict[str, Any]] = []
    for i in range(12):
        prompt = text(i + 1, 1 + i % 4)
        pair = {"chosen": text(i, 1 + i % 5), "rejected": text(i + 3, 9 - i % 7)}
        if kind == "grpo":
            table.append({"prompt": prompt})
        elif kind == "reward":
            table.append({**pair, "margin": i / 8})
        else:
            table.append({**pair, "prompt": prompt})
    return table


def auto_class(kind: str) -> Any:
    """The class of transformers that builds the model of a trainer."""
    return AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM


def model_of(kind: str, tokenizer: Any, attention: str) -> Any:
    """A small Llama in fp64 for a kind of trainer, or for "moe" a small mixture of experts."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.2,
        "num_labels": 1,
    }
    if kind == "moe":
        config: Any = Qwen3MoeConfig(
            **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8
        )
    else:
        config = LlamaConfig(**sizes)

    torch.manual_seed(0)
    model = auto_class(kind).from_config(
        config, attn_implementation=attention, experts_implementation="eager"
    )
    return model.double()


def reward_long(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


class ExactHead:
    """What TRL's fused head computes, in the dtype it is given: its own sums are fp32, tile by tile."""

    @staticmethod
    def apply(hidden: Any, weight: Any, bias: Any, labels: Any, temperature: float, *others: Any) -> Any:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        log_p = (logits / temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        of_labels = log_p.gather(-1, labels[:, None])[:, 0]
        return of_labels, entropy, None, logits.mean(-1).detach(), logits.argmax(-1) == labels


def exact_balance(gates: Any, experts: int, top_k: int, mask: Any = None) -> torch.Tensor:
    """Compute transformers' balancing loss of experts, whose own sums are fp32."""
    if mask is not None:
        gates = [gate[mask.reshape(-1).bool()] for gate in gates]
    logits = torch.cat(list(gates))
    probabilities = logits.softmax(-1)
    chosen = torch.nn.functional.one_hot(probabilities.topk(top_k, -1).indices, experts).sum(1)
    return experts * (chosen.to(logits).mean(0) * probabilities.mean(0)).sum()


def use_exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what TRL and transformers sum in fp32 by the same in fp64."""
    from transformers.models.mixtral import modeling_mixtral
    from trl.trainer import utils

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", ExactHead)
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", exact_balance)


def train(kind: str, packed: bool, out: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train with TRL's own trainer, or with the same one on packs."""
    warnings.simplefilter("ignore")
    tokenizer = make_tokenizer(PLAIN)
    options = dict(options)
    lora = options.pop("lora", False)
    experts = options.pop("experts", False)
    is_wide = "share_prefixes" in options  # norms in fp32 round gradients before they are summed
    shares = options.pop("share_prefixes", False)
    patch = pytest.MonkeyPatch()
    if options.pop("exact", False):
        use_exact_sums(patch)

    name = {"dpo": "DPO", "reward": "Reward", "grpo": "GRPO"}[kind]
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }
    if kind == "grpo":
        settings |= {"num_generations": 2, "max_completion_length": 8, "beta": 0.1}
    args = getattr(trl, f"{name}Config")(
        output_dir=out, use_cpu=True, bf16=False, disable_tqdm=True, **{**settings, **options}
    )

    folder = f"{out}/model"  # DPO and GRPO build their reference model from it
    if dist.get_rank() == 0:
        model_of("moe" if experts else kind, tokenizer, "sdpa").save_pretrained(folder)
    dist.barrier()

    def load() -> Any:
        attention = "thd" if packed else "sdpa"
        return auto_class(kind).from_pretrained(
            folder, dtype=torch.float64, attn_implementation=attention, experts_implementation="eager"
        )

    arguments: dict[str, Any] = {
        "model": load(),
        "args": args,
        "processing_class": tokenizer,
        "train_dataset": Dataset.from_list(rows(kind)),
    }
    if kind == "grpo":
        arguments["reward_funcs"] = reward_long
    else:
        arguments["eval_dataset"] = Dataset.from_list(rows(kind)[:5])
    if experts:  # TRL would build its reference with grouped products, which know no fp64
        arguments["ref_model"] = load()
    if lora:
        from peft import LoraConfig

        torch.manual_seed(1)
        arguments["peft_config"] = LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )

    trainer_class = getattr(trl, f"{name}Trainer")
    if packed:
        trainer_class = packed_trainer(trainer_class)
        if shares:
            arguments["share_prefixes"] = True
    trainer = trainer_class(**arguments)
    with nothing_narrower() if is_wide else contextlib.nullcontext():
        trainer.train()
        if kind != "grpo":
            trainer.evaluate()
    patch.undo()

    logs = [
        {key: float(value) for key, value in entry.items() if not UNLIKE.search(key)}
        for entry in trainer.state.log_history
    ]
    params = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return {"logs": logs, "params": params}


def both(kind: str, out: str, options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Train on packs and on padded rows; with ``share_prefixes``, on packs with it and without it."""
    on_packs = train(kind, True, f"{out}/packed", options)
    if "share_prefixes" in options:
        return on_packs, train(kind, True, f"{out}/rows", {**options, "share_prefixes": False})
    return on_packs, train(kind, False, f"{out}/rows", options)


def check(kind: str, folder: Path, world: int = 1, to: tuple[float, float] = OF_TRL, **options: Any) -> None:
    """Compare logs and weights of two trainings, in ``world`` processes, to bounds of losses and others."""
    losses_to, others_to = to
    if kind != "reward" and not RUNS:
        pytest.skip(WHY)
    for ours, theirs in run_ranks(both, world, kind, str(folder), options):
        assert len(ours["logs"]) >= STEPS
        for log, their_log in zip(ours["logs"], theirs["logs"], strict=True):
            norm = their_log.pop("grad_norm", 0.0)
            assert log.pop("grad_norm", 0.0) == pytest.approx(norm, rel=others_to)
            for name in [name for name in log if name.endswith("loss")]:
                loss = their_log.pop(name)
                assert log.pop(name) == pytest.approx(loss, rel=losses_to, abs=losses_to), name
            assert log == pytest.approx(their_log, rel=others_to, abs=others_to)  # differences of large sums
        assert largest_error(ours["params"], theirs["params"]) < others_to


@pytest.mark.parametrize("kind", ["dpo", "reward", pytest.param("grpo", marks=pytest.mark.slow)])
def test_losses_metrics_and_weights_are_those_of_padded_rows(kind: str, tmp_path: Path) -> None:
    """A trainer on packs logs and learns what TRL's own trainer does on padded rows."""
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
    """Packs in which prompts are computed once log and learn what other packs do."""
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
    """Options of DPO change packs and padded rows alike."""
    check("dpo", tmp_path, **options)


@pytest.mark.parametrize("name", NAMES)
def test_what_would_change_the_numbers_is_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Options that are wrong for packs, and arguments of other trainers, are refused."""
    packed: Any = packed_trainer(getattr(trl, f"{name}Trainer"))
    trainer: Any = object.__new__(packed)
    for option, why in REFUSED_FOR_ROWS.items():
        trainer.args = SimpleNamespace(**{option: True})
        with pytest.raises(ValueError, match=re.escape(f"({option}=True) {why}. Leave it at its default.")):
            trainer._refuse_what_rows_cannot()
    with caplog.at_level("INFO"):
        trainer.args = SimpleNamespace(pad_to_multiple_of=8)
        trainer._refuse_what_rows_cannot()
    assert "pad_to_multiple_of=8 has no effect on packs, which hold no padding" in caplog.text

    with pytest.raises(TypeError, match=f"Packed{name}Trainer got capacity, but a batch of"):
        packed(model=None, args=None, capacity=64)
    with pytest.raises(TypeError, match="got router_balance, but TRL averages over"):
        packed(model=None, args=None, router_balance="step")


def test_images_beside_padded_rows_are_refused() -> None:
    model = model_of("reward", make_tokenizer(PLAIN), "sdpa")
    pack_rows(model)
    ids = torch.arange(1, 9).view(2, 4)
    with pytest.raises(ValueError, match=r"got pixel_values beside padded rows, and packed_trainer packs"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=ids)


@pytest.mark.parametrize("name", ["DPOTrainer", "GRPOTrainer"])
def test_trainers_of_an_older_trl_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL before 1.15 makes logits of padded rows; its reward trainer needs none."""
    if FUSED:
        monkeypatch.setattr(hf_rows, "_has_fused_head", lambda: False)
    with pytest.raises(ValueError, match=rf"packed_trainer\({name}\) needs TRL 1.15 or newer, and "):
        packed_trainer(getattr(trl, name))
    packed_trainer(trl.RewardTrainer)


def test_a_model_that_ranks_would_train_by_themselves_is_refused() -> None:
    """Trainer's own evaluate() before train() leaves a model without DDP."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Linear runs without DistributedDataParallel"):
        refuse_without_ddp(DistributedType.MULTI_CPU, model)
    refuse_without_ddp(DistributedType.NO, model)
    refuse_without_ddp(DistributedType.FSDP, model)


@pytest.mark.filterwarnings("ignore")
@needs_fused
def test_a_model_goes_on_to_another_trainer_or_loss(tmp_path: Path) -> None:
    """A second trainer's settings replace the first one's, and other losses of the model stay right."""
    tokenizer = make_tokenizer(PLAIN)
    data = Dataset.from_list(rows("dpo"))
    args = trl.DPOConfig(str(tmp_path), use_cpu=True, bf16=False, max_steps=1, save_strategy="no")
    models = [model_of("dpo", tokenizer, "thd") for _ in range(2)]
    for share in (False, True):
        trainer = packed_trainer(trl.DPOTrainer)(
            *models, args, processing_class=tokenizer, train_dataset=data, share_prefixes=share
        )
        trainer.train()
    assert [model._thd_shares_prefixes for model in models] == [True, True]

    trained = models[0].eval()
    fresh = model_of("dpo", tokenizer, "thd").eval()
    fresh.load_state_dict(trained.state_dict())
    batch = THDBatch.collate([{"input_ids": [5, 6, 7]}] * 2)
    assert torch.equal(causal_lm_loss(trained, batch), causal_lm_loss(fresh, batch))
    inputs = batch.hf_kwargs()
    assert torch.equal(trained(**inputs).logits, fresh(**inputs).logits)


@pytest.mark.parametrize("name", NAMES)
def test_another_attention_is_refused_as_for_sft(name: str, tmp_path: Path) -> None:
    """Models, references and names with another attention are refused before anything is tokenised."""
    tokenizer = make_tokenizer(PLAIN)
    kind = name.lower()
    data = Dataset.from_list(rows(kind))
    model_of(kind, tokenizer, "thd").save_pretrained(tmp_path)
    thd = model_of(kind, tokenizer, "thd")
    other = model_of(kind, tokenizer, "sdpa")
    cases: list[Any] = [((other,), None), ((str(tmp_path),), "sdpa")]
    if name == "DPO":
        cases.append(((thd, other), None))

    for models, attention in cases:
        warnings.simplefilter("ignore", FutureWarning)
        args = getattr(trl, f"{name}Config")(str(tmp_path), use_cpu=True, bf16=False)
        args.model_init_kwargs = None if attention is None else {"attn_implementation": attention}
        with pytest.raises(
            ValueError, match="runs attn_implementation='sdpa', under which sequences of a pack may see"
        ):
            packed_trainer(getattr(trl, f"{name}Trainer"))(
                *models, args=args, train_dataset=data, processing_class=tokenizer
            )

    pack_rows(thd)
    assert thd.config._attn_implementation == "thd"
    assert thd._thd_padded_attention == "sdpa"


@needs_fused
def test_a_call_with_shared_prefixes_keeps_its_divisor_and_balances_no_experts() -> None:
    """Loss and log-probabilities are those without shared prefixes; a balancing loss is refused."""
    from trl.trainer.utils import add_fused_lm_head

    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0], [5, 6, 7, 0]])
    inputs = {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": ids.where((ids != 0) & (ids != 5), -100),
        "fused_lm_head": True,
    }
    plain_model, sharing_model = (model_of("moe", make_tokenizer(PLAIN), "sdpa") for _ in range(2))
    add_fused_lm_head(plain_model)
    pack_rows(plain_model)
    add_fused_lm_head(sharing_model)
    pack_rows(sharing_model, share_prefixes=True)

    for divisor in ({}, {"num_items_in_batch": torch.tensor(5)}):
        plain = plain_model(**inputs, **divisor)
        shared = sharing_model(**inputs, **divisor)
        torch.testing.assert_close(shared.log_probs, plain.log_probs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(shared.loss, plain.loss, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="balances its experts over the tokens of a batch"):
        sharing_model(**inputs, output_router_logits=True)


def test_other_calls_of_a_packed_model_see_padded_rows() -> None:
    """Logits, generation and copies of a model that packs rows are those of the model as it was."""
    tokenizer = make_tokenizer(PLAIN)
    plain, packing = (model_of("dpo", tokenizer, "sdpa").train() for _ in range(2))
    pack_rows(packing)
    ids = torch.arange(1, 13).view(2, 6) % len(tokenizer)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        logits = packing(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        assert torch.equal(logits, plain(input_ids=ids, attention_mask=mask).logits[mask.bool()])
        assert logits.isfinite().all()
        logits = packing(input_ids=ids[1:]).logits
        assert torch.equal(logits, plain(input_ids=ids[1:]).logits)
        assert logits.isfinite().all()

        generation: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
        assert torch.equal(packing.generate(ids, **generation), plain.generate(ids, **generation))

    # A copy, as callbacks that average weights make, is a model of its own.
    copied = copy.deepcopy(packing)
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        expected = plain(**inputs).logits[mask.bool()]
        packing.get_output_embeddings().weight.zero_()
        assert torch.equal(copied(**inputs).logits[mask.bool()], expected)
        assert not packing(**inputs).logits[mask.bool()].any()

    checkpoint_activations(packing)
    with pytest.raises(ValueError, match="but not for log-probabilities, with gradients"):
        packing(input_ids=ids)
