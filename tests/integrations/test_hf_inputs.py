"""What packed_trainer takes: paths, the name of a model, a tokenizer; and what it refuses before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from lightning_thd.data import ByteTokenizer
from lightning_thd.integrations import packed_trainer
from tests.data.chats import PLAIN, make_tokenizer
from tests.tiny import sequences, tiny_llama

TEXTS = [f"text {i} " * (1 + i % 4) for i in range(12)]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    return file


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )


def small_model() -> Any:
    """Return a model whose vocabulary holds bytes and the tokens of the tests' tokenizer."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=1_024, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="thd")


def make(folder: Path, **further: Any) -> Any:
    return packed_trainer()(model=small_model(), args=arguments(folder), capacity=128, peak=1e12, **further)


def test_paths_are_read_as_the_data_module_reads_them(texts: Path, tmp_path: Path) -> None:
    reading = {"text_key": "body", "tokenizer": ByteTokenizer(), "cache_dir": str(tmp_path / "cache")}
    trainer = make(tmp_path, train_dataset=str(texts), eval_dataset={"same": texts}, data_kwargs=reading)
    expected = [[*text.encode(), 257] for text in TEXTS]  # 257 ends a document
    assert [row["input_ids"] for row in trainer.train_dataset] == expected
    assert [row["input_ids"] for row in trainer.eval_dataset["same"]] == expected
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.evaluate()["eval_same_loss"] > 0


def test_arguments_of_files_need_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data_kwargs has text_key, which only files need"):
        make(tmp_path, train_dataset=sequences(4), data_kwargs={"text_key": "body"})


def test_another_attention_is_refused_before_anything_is_tokenised(tmp_path: Path) -> None:
    touched: list[int] = []

    class Base(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            touched.append(1)
            super().__init__(*args, **kwargs)

    model = AutoModelForCausalLM.from_config(tiny_llama().config, attn_implementation="sdpa")
    with pytest.raises(
        ValueError, match="attn_implementation='sdpa', under which sequences of a pack may see"
    ):
        packed_trainer(Base)(model=model, args=arguments(tmp_path), train_dataset=sequences(4), capacity=64)
    assert touched == []


def test_the_name_of_a_model_is_for_trl(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="The model is a name, which transformers' Trainer does not load"):
        packed_trainer()(model="org/name", args=arguments(tmp_path), train_dataset=sequences(4), capacity=64)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # TRL's own default
def test_trl_builds_a_model_that_it_gets_by_name_with_thd(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    folder = tmp_path / "model"
    small_model().save_pretrained(folder)
    make_tokenizer(PLAIN).save_pretrained(folder)
    quiet = {"max_steps": 1, "use_cpu": True, "report_to": [], "bf16": False}
    args = trl.SFTConfig(output_dir=str(tmp_path / "out"), **quiet)
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "hello there"}) + "\n" for _ in range(6)))
    trainer = packed_trainer(trl.SFTTrainer)(
        model=str(folder),
        args=args,
        train_dataset=str(file),
        processing_class=make_tokenizer(PLAIN),
        data_kwargs={"cache_dir": str(tmp_path / "cache")},
        capacity=64,
        peak=1e12,
    )

    assert trainer.model.config._attn_implementation == "thd"
    trainer.train()
    assert trainer.state.global_step == 1

    args = trl.SFTConfig(output_dir=str(tmp_path), model_init_kwargs={"attn_implementation": "sdpa"}, **quiet)
    with pytest.raises(
        ValueError, match="attn_implementation='sdpa', under which sequences of a pack may see"
    ):
        packed_trainer(trl.SFTTrainer)(model=str(folder), args=args, train_dataset=str(file), capacity=64)
