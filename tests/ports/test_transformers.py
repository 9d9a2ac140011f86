"""Scripts around transformers' models train on packs as on one row at a time; wrong ports are refused.

run_clm, an Accelerate fine-tuning, TRL's SFT and DPO, run_glue, run_mlm, and log-probabilities of rollouts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    TrainingArguments,
)

from lightning_thd import Sequences, THDDataModule, prepare_thd
from lightning_thd.integrations import packed_trainer
from lightning_thd.loss import PackedRollouts, causal_lm_logprobs
from lightning_thd.loss.preference import dpo_loss
from tests.data.chats import PLAIN, make_tokenizer
from tests.integrations.test_hf_rows import needs_fused
from tests.ports.oracle import (
    STEPS,
    Ran,
    check,
    check_gradients,
    note_gradients,
    optimizer_of,
    parameters_of,
    train_alone,
)
from tests.tiny import VOCAB, largest_error, sequences
from tests.wide import nothing_narrower

trl = pytest.importorskip("trl")

ROWS = [row for row in sequences(60) if len(row["input_ids"]) > 1]
SIZES: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def wide() -> Iterator[None]:
    """Keep norms in fp64, which transformers computes in fp32."""
    with nothing_narrower():
        yield


def llama(attention: str = "thd", vocabulary: int = VOCAB) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary, num_key_value_heads=1, pad_token_id=0, **SIZES)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.double()


def bert(auto: Any, attention: str = "thd") -> nn.Module:
    torch.manual_seed(0)
    off = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "num_labels": 3}
    config = BertConfig(vocab_size=VOCAB, max_position_embeddings=32, pad_token_id=0, **off, **SIZES)
    model: nn.Module = auto.from_config(config, attn_implementation=attention)
    return model.double()


def eager(model: nn.Module) -> nn.Module:
    """Return a copy of a model as it was before its port."""
    copied: Any = copy.deepcopy(model)
    copied.set_attn_implementation("eager")
    return copied


def causal_alone(model: nn.Module, row: dict[str, Any]) -> tuple[Tensor, int]:
    ids = torch.as_tensor(np.asarray(row["input_ids"]))
    labels = torch.as_tensor(np.asarray(row.get("labels", ids)))[1:]
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits, labels, reduction="sum"), int((labels != -100).sum())


def in_trainer(model: nn.Module, rows: Any, folder: Path, base: Any = None, **options: Any) -> Ran:
    """Train with transformers' Trainer or a subclass on packs, and note the rows of every step."""
    ran = Ran.nothing()

    class Noting(packed_trainer(base)):  # type: ignore[misc]
        def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
            step = inputs["batch"]
            ran.steps.append([i for batch in step.microbatches for i in batch.sequence_ids])
            loss: Tensor = super().training_step(model, inputs, *args)
            ran.losses.append(float(loss))
            return loss

    settings: Any = {"max_steps": STEPS, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    settings |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    settings["bf16"] = False  # TRL's default is True
    arguments = options.pop("arguments", TrainingArguments)(str(folder), **settings)
    setup: Any = {"data_kwargs": {"global_batch": Sequences(6)}, "capacity": 48, "peak": 1e9, **options}
    optimizers = note_gradients(optimizer_of(model.parameters()), model, ran), None
    Noting(model=model, args=arguments, train_dataset=rows, optimizers=optimizers, **setup).train()
    return ran._replace(parameters=parameters_of(model))


@pytest.mark.usefixtures("wide")
def test_run_clm(tmp_path: Path) -> None:
    model = llama()
    start = eager(model)
    check(start, ROWS, in_trainer(model, ROWS, tmp_path), causal_alone)
    with pytest.raises(
        ValueError, match="runs attn_implementation='eager', under which sequences of a pack may see"
    ):
        in_trainer(start, ROWS, tmp_path)


@pytest.mark.usefixtures("wide")
def test_an_accelerate_script() -> None:
    model = llama()
    start = eager(model)
    accelerator = accelerate.Accelerator(cpu=True)
    data = THDDataModule(ROWS, capacity=48, global_batch=Sequences(6))
    ran = Ran.nothing()
    optimizer = note_gradients(optimizer_of(model.parameters()), model, ran)
    loop = prepare_thd(accelerator, model, data, optimizer, peak=1e9)

    for _, step in zip(range(STEPS), loop.loader, strict=False):
        ran.losses.append(float(loop.backward(step)))
        ran.steps.append([i for batch in step.microbatches for i in batch.sequence_ids])
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    check(start, ROWS, ran._replace(parameters=parameters_of(model)), causal_alone)
    wrong = prepare_thd(accelerator, start, data, optimizer_of(start.parameters()), peak=1e9)
    with pytest.raises(ValueError, match="runs attn_implementation='eager', which can let packed"):
        wrong.backward(next(iter(wrong.loader)))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL's own defaults
def test_trl_sft_with_prompts(tmp_path: Path) -> None:
    """The loss covers the completions, which TRL marks by a mask."""
    tokenizer = make_tokenizer(PLAIN)
    model = llama(vocabulary=len(tokenizer))
    draw = np.random.default_rng(0)
    rows = []

    for _ in range(40):
        length = int(draw.integers(4, 20))
        ids = draw.integers(1, len(tokenizer), length).tolist()
        rows.append({"input_ids": ids, "completion_mask": [0, 0, *[1] * (length - 2)]})

    start = eager(model)
    chosen = partial(trl.SFTConfig, completion_only_loss=True)
    options: Any = {"processing_class": tokenizer, "arguments": chosen}
    ran = in_trainer(model, Dataset.from_list(rows), tmp_path, trl.SFTTrainer, **options)
    labelled = [{"input_ids": r["input_ids"], "labels": [-100, -100, *r["input_ids"][2:]]} for r in rows]

    check(start, labelled, ran, causal_alone, to=1e-6)  # TRL's head computes in fp32
    with pytest.raises(ValueError, match="packing=True"):
        in_trainer(
            model,
            Dataset.from_list(rows),
            tmp_path,
            trl.SFTTrainer,
            processing_class=tokenizer,
            arguments=partial(chosen, packing=True),
        )


@pytest.mark.usefixtures("wide")
def test_run_glue(tmp_path: Path) -> None:
    model = bert(AutoModelForSequenceClassification)
    rows = [{**row, "label": i % 3} for i, row in enumerate(ROWS)]

    def alone(model: nn.Module, row: dict[str, Any]) -> tuple[Tensor, int]:
        ids = torch.as_tensor(row["input_ids"])[None]
        logits = model(input_ids=ids).logits
        return F.cross_entropy(logits, torch.tensor([row["label"]])), 1

    start = eager(model)
    check(start, rows, in_trainer(model, rows, tmp_path), alone)
    with pytest.raises(ValueError, match="label"):
        in_trainer(model, ROWS, tmp_path)


@pytest.mark.usefixtures("wide")
def test_run_mlm(tmp_path: Path) -> None:
    """Labels are those of the masked tokens, and not shifted."""
    model = bert(AutoModelForMaskedLM)
    draw = np.random.default_rng(0)
    rows = []
    for row in ROWS:
        ids = np.array(row["input_ids"])
        masked = draw.random(len(ids)) < 0.4
        masked[0] = False
        masked[-1] = True
        rows.append({"input_ids": np.where(masked, 3, ids), "labels": np.where(masked, ids, -100)})

    def alone(model: nn.Module, row: dict[str, Any]) -> tuple[Tensor, int]:
        ids, labels = (torch.as_tensor(row[name]) for name in ("input_ids", "labels"))
        logits = model(input_ids=ids[None]).logits[0]
        return F.cross_entropy(logits, labels, reduction="sum"), int((labels != -100).sum())

    start = eager(model)
    check(start, rows, in_trainer(model, rows, tmp_path), alone)
    with pytest.raises(ValueError, match="has no labels, which token classifiers and masked language models"):
        in_trainer(model, ROWS, tmp_path)


def rollouts(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad rows on the right; the first two tokens are the prompt."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = torch.as_tensor(row["input_ids"])
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = torch.arange(width) < lengths[:, None]
    return ids, mask.long(), mask & (torch.arange(width) >= 2)


def logps_alone(model: nn.Module, row: dict[str, Any]) -> Tensor:
    ids = torch.as_tensor(row["input_ids"])
    logp = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    return logp[1:-1].gather(-1, ids[2:, None]).sum()


@pytest.mark.usefixtures("wide")
def test_log_probabilities_of_rollouts() -> None:
    """A policy gradient with given advantages, over packs of rollouts."""
    rows = [row for row in ROWS if len(row["input_ids"]) > 3][:40]
    model = llama()
    start = eager(model)
    ran = Ran.nothing()
    optimizer = note_gradients(optimizer_of(model.parameters()), model, ran)
    for step in range(STEPS):
        picked = [(7 * step + k) % len(rows) for k in range(6)]
        ids, mask, response = rollouts([rows[i] for i in picked])
        packed = PackedRollouts.from_padded(ids, mask, response_mask=response)
        sums = packed.sums(causal_lm_logprobs(model, packed.batch).logp)
        loss = -(sums * (torch.tensor(picked) % 3 - 1.0)).mean() / 10
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ran.losses.append(float(loss.detach()))
        ran.steps.append(picked)
    numbered = [{**row, "advantage": i % 3 - 1.0} for i, row in enumerate(rows)]

    def alone(model: nn.Module, row: dict[str, Any]) -> tuple[Tensor, int]:
        return -logps_alone(model, row) * row["advantage"] / 10, 1

    check(start, numbered, ran._replace(parameters=parameters_of(model)), alone)
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        causal_lm_logprobs(start, packed.batch)


@pytest.mark.slow
@needs_fused
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL's own defaults
def test_trl_dpo(tmp_path: Path) -> None:
    """The loss of pairs against a frozen reference."""
    tokenizer = make_tokenizer(PLAIN)
    model = llama(vocabulary=len(tokenizer))
    start = eager(model)
    pairs = [
        {"prompt": "a pack", "chosen": f" of rows {'is ' * (i % 3)}", "rejected": " one"} for i in range(8)
    ]
    settings: Any = {"max_steps": STEPS, "per_device_train_batch_size": 8, "lr_scheduler_type": "constant"}
    settings |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "max_grad_norm": 0.0, "bf16": False}
    arguments = trl.DPOConfig(str(tmp_path), logging_steps=1, disable_tqdm=True, **settings)
    options: Any = {
        "args": arguments,
        "processing_class": tokenizer,
        "train_dataset": Dataset.from_list(pairs),
    }
    ran = Ran.nothing()
    trainer = packed_trainer(trl.DPOTrainer)(
        model=model,
        ref_model=copy.deepcopy(model),
        optimizers=(note_gradients(optimizer_of(model.parameters()), model, ran), None),
        **options,
    )
    columns = [trainer.train_dataset[i] for i in range(len(pairs))]
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]

    def answers(of: nn.Module, row: dict[str, Any], which: str) -> Tensor:
        ids = torch.tensor([*row["prompt_ids"], *row[f"{which}_ids"]])
        logp = of(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        first = len(row["prompt_ids"])
        return logp[first - 1 : -1].gather(-1, ids[first:, None]).sum()

    def alone(policy: nn.Module, row: dict[str, Any]) -> tuple[Tensor, int]:
        with torch.no_grad():
            reference = [answers(start, row, which)[None] for which in ("chosen", "rejected")]
        both = [answers(policy, row, which)[None] for which in ("chosen", "rejected")]
        return dpo_loss(*both, *reference, beta=arguments.beta), 1

    expected = train_alone(start, columns, [list(range(8))] * STEPS, alone)
    assert losses == pytest.approx(expected.losses, rel=1e-4)  # Trainer rounds what it logs
    check_gradients(ran, expected, to=1e-4)  # TRL's head computes in fp32
    assert largest_error(parameters_of(model), expected.parameters) < 1e-5
    with pytest.raises(
        ValueError, match="runs attn_implementation='eager', under which sequences of a pack may see"
    ):
        packed_trainer(trl.DPOTrainer)(model=start, **options)
