"""TRL's SFTTrainer, packing left to us: the assistant's tokens alone, and what a hand loop gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, MixtralConfig

from lightning_thd import Packs
from lightning_thd.integrations import packed_trainer
from lightning_thd.integrations.hf_data import packed_dataset
from lightning_thd.packing import PackPlanner
from tests.data.chats import MARKED, PLAIN, TALKS, make_tokenizer
from tests.ranks import run_ranks
from tests.tiny import largest_error, nll, tiny_llama

trl = pytest.importorskip("trl")
SFTConfig = trl.SFTConfig
SFTTrainer = trl.SFTTrainer

CAPACITY = 64
STEPS = 4
QUIET: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}


def model_of(tokenizer: Any) -> Any:
    model: Any = tiny_llama()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.1)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.1)
    return model


def train(out: str, kind: str) -> dict[str, Any]:
    tokenizer = make_tokenizer(MARKED if kind == "assistant" else PLAIN)
    rows: list[dict[str, Any]] = [{"messages": talk} for talk in TALKS]
    if kind == "completion":
        rows = [{"prompt": talk[:-1], "completion": talk[-1:]} for talk in TALKS]

    model = model_of(tokenizer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    trainer = packed_trainer(SFTTrainer)(
        model=model,
        args=SFTConfig(
            output_dir=out,
            max_steps=STEPS,
            max_grad_norm=0.5,
            logging_steps=1,
            gradient_checkpointing=False,
            assistant_only_loss=kind == "assistant",
            **QUIET,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        capacity=CAPACITY,
        peak=1e9,
    )

    prepared = [packed_dataset(trainer.train_dataset)[i] for i in range(len(rows))]
    trainer.train()
    trainer.evaluate(trainer.train_dataset)
    entropy, accuracy = token_metrics(trainer.model, prepared)
    trainer.compute_loss = lambda *_, **__: torch.zeros(())  # a user's own, which computes no entropy

    return {
        "own": trainer.evaluate(trainer.train_dataset, metric_key_prefix="own"),
        "evaluated": {"entropy": entropy, "mean_token_accuracy": accuracy},
        "params": {n: p.detach() for n, p in trainer.model.named_parameters()},
        "logs": trainer.state.log_history,
        "samples": prepared,
    }


@torch.no_grad()
def token_metrics(model: Any, samples: list[dict[str, Any]]) -> tuple[float, float]:
    """Return mean entropy and accuracy in front of the learned tokens, sequence by sequence."""
    entropy = 0.0
    right = 0
    count = 0
    for sample in samples:
        ids = torch.as_tensor(sample["input_ids"]).long()
        labels = torch.as_tensor(sample.get("labels", ids)).long()[1:]
        logp = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)[labels != -100]
        entropy -= float((logp * logp.exp()).sum())
        right += int((logp.argmax(-1) == labels[labels != -100]).sum())
        count += len(logp)
    return entropy / count, right / count


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("completion", "all")]


@pytest.mark.parametrize("kind", ["assistant", *SLOW])
def test_sft_trainer_equals_the_hand_loop(kind: str, tmp_path: Path) -> None:
    [result] = run_ranks(train, 1, str(tmp_path), kind)
    samples = result["samples"]
    learned = [sum(int(x) != -100 for x in s.get("labels", s["input_ids"])) for s in samples]
    whole = [len(s["input_ids"]) for s in samples]
    assert all(0 < a < b for a, b in zip(learned, whole, strict=True)) == (kind != "all")

    model = model_of(make_tokenizer(PLAIN))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    planner = PackPlanner(whole, CAPACITY, global_batch=Packs(1))
    losses = []
    metrics = []
    for k in range(STEPS):
        epoch, step = divmod(k, len(planner))
        ids = [int(i) for i in planner.step(epoch, step, 1).indices_by_rank()[0][0]]
        results = [nll(model, samples[i]) for i in ids]
        loss = sum(total for total, _ in results) / sum(count for _, count in results)
        seen = token_metrics(model, [samples[i] for i in ids])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
        metrics.append(seen)
    expected = {n: p.detach() for n, p in model.named_parameters()}
    assert largest_error(result["params"], expected) < 1e-12
    logged = [row["loss"] for row in result["logs"] if "loss" in row]
    assert logged == pytest.approx(losses, rel=1e-3)  # Trainer rounds what it logs
    assert any("device/mfu" in row for row in result["logs"])
    assert ("own_loss" in result["own"], "own_entropy" in result["own"]) == (True, False)
    for key, values in zip(("entropy", "mean_token_accuracy"), zip(*metrics, strict=True), strict=True):
        assert [row[key] for row in result["logs"] if "loss" in row] == pytest.approx(values, rel=1e-9)
        [last] = [row[f"eval_{key}"] for row in result["logs"] if "eval_loss" in row]
        assert last == pytest.approx(result["evaluated"][key], rel=1e-9)
    tokens = [row["num_tokens"] for row in result["logs"] if "loss" in row]
    used = [planner.step(*divmod(k, len(planner)), 1).indices_by_rank()[0][0] for k in range(STEPS)]
    assert tokens[-1] == sum(whole[int(i)] for ids in used for i in ids)


def fields_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]


def balance(out: str) -> tuple[float, float]:
    tokenizer = make_tokenizer(PLAIN)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}

    factor: dict[str, Any] = {"router_aux_loss_coef": 0.5}
    # TRL 1.0 has no such option: its trainer balances experts as the model's config says.
    option = {} if "router_aux_loss_coef" in fields_of(SFTConfig) else factor | {"output_router_logits": True}

    config = MixtralConfig(**sizes, **heads, **option)
    trainer = packed_trainer(SFTTrainer)(
        model=AutoModelForCausalLM.from_config(config, attn_implementation="thd"),
        args=SFTConfig(output_dir=out, max_length=None, **({} if option else factor), **QUIET),
        train_dataset=Dataset.from_list([{"messages": talk} for talk in TALKS]),
        processing_class=tokenizer,
        capacity=CAPACITY,
        router_balance="microbatch",
    )

    inputs = next(iter(trainer.get_train_dataloader()))
    batch = inputs["batch"]
    output = trainer.model(**batch.hf_kwargs())
    losses = torch.nn.functional.cross_entropy(output.logits[0], batch.targets, reduction="sum")
    expected = losses / batch.loss_tokens + 0.5 * output.aux_loss
    return trainer.compute_loss(trainer.model, inputs).item(), expected.item()


def test_the_balance_of_experts_weighs_what_sft_config_says(tmp_path: Path) -> None:
    [(actual, expected)] = run_ranks(balance, 1, str(tmp_path))
    assert actual == pytest.approx(expected, rel=1e-5)
