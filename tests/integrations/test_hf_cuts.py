"""TRL's max_length under packed_trainer: what it cuts is what TRL cuts, and is counted and reported."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from lightning_thd._private import PrivateNameGone
from lightning_thd.integrations import packed_trainer
from lightning_thd.integrations.hf_cuts import report_cut_pairs
from lightning_thd.warnings import DataWarning
from tests.data.chats import MARKED, PLAIN, TALKS, make_tokenizer
from tests.ranks import run_ranks

trl = pytest.importorskip("trl")
# What TRL's own defaults make transformers say.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

QUIET: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}
LONG = [{"role": "user", "content": "two plus two " * 900}, {"role": "assistant", "content": "is four"}]
# Since 1.15 the trainers of pairs ask the model for log-probabilities, which packs can give.
needs_fused = pytest.mark.skipif(not hasattr(trl.trainer, "add_fused_lm_head"), reason="TRL is before 1.15")


def model_of(tokenizer: Any, kind: Any = AutoModelForCausalLM, attention: str = "thd") -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "num_labels": 1}
    return kind.from_config(LlamaConfig(**sizes, **tokens), attn_implementation=attention)


def sft(folder: Path, dataset: Any, *, template: str = PLAIN, data_kwargs: Any = None, **options: Any) -> Any:
    """A packed trainer of TRL with a data set and options of SFTConfig."""
    tokenizer = make_tokenizer(template)
    return packed_trainer(trl.SFTTrainer)(
        model=model_of(tokenizer),
        args=trl.SFTConfig(str(folder), max_steps=1, **QUIET, **options),
        train_dataset=dataset,
        processing_class=tokenizer,
        data_kwargs=data_kwargs,
        capacity=8_192,
        peak=1e12,
    )


def conversations(*talks: Any) -> Dataset:
    return Dataset.from_list([{"messages": talk} for talk in talks])


def chats(folder: Path, *talks: Any) -> str:
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return str(file)


def lengths_of(trainer: Any) -> list[int]:
    return [len(ids) for ids in trainer.train_dataset["input_ids"]]


@pytest.mark.parametrize("kind", ["dataset", "path"])
def test_the_default_of_trl_does_not_cut_without_a_warning(kind: str, tmp_path: Path) -> None:
    """A path and a data set lose the same tokens, and the warning counts them."""
    source = conversations(LONG, *TALKS) if kind == "dataset" else chats(tmp_path, LONG, *TALKS)
    of_files = {"cache_dir": str(tmp_path / "cache")}
    kept = sft(tmp_path, source, max_length=None, data_kwargs=of_files)
    whole = lengths_of(kept)
    assert whole[0] > 2_000

    with pytest.warns(DataWarning, match=r"train: 1 of 4 sequences are longer than SFTConfig") as caught:
        trainer = sft(tmp_path, source, data_kwargs=of_files)
    assert lengths_of(trainer)[0] == 1_024 or kind == "path"
    [message] = [str(one.message) for one in caught if issubclass(one.category, DataWarning)]
    assert f"(max_length=1024), TRL's default, which cut {whole[0] - 1_024:,} tokens from them" in message
    assert "Pass max_length=None to keep them whole: capacity is the only bound then" in message


def test_a_path_whose_answer_is_cut_off_is_left_out_and_counted(tmp_path: Path) -> None:
    """Of a path only answers are learned: the long talk has none among its first 1,024 tokens."""
    source = chats(tmp_path, LONG, *TALKS)
    with pytest.warns(DataWarning, match=r"and left out 1, in which no token to learn remained\. Pass"):
        trainer = sft(tmp_path, source, data_kwargs={"cache_dir": str(tmp_path / "cache")})
    assert len(trainer.train_dataset) == len(TALKS)


def test_sequences_that_fit_are_reported_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        trainer = sft(tmp_path, conversations(*TALKS))
    assert max(lengths_of(trainer)) < 1_024
    assert "max_length" not in caplog.text


@pytest.mark.filterwarnings("ignore:.*keep_end:FutureWarning")
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (conversations(*TALKS), {"max_length": 20}),
        (conversations(*TALKS), {"max_length": 20, "truncation_mode": "keep_end"}),
        (conversations(*TALKS), {"max_length": 20, "assistant_only_loss": True, "shuffle_dataset": True}),
        (
            Dataset.from_list([{"prompt": talk[:-1], "completion": talk[-1:]} for talk in TALKS]),
            {"max_length": 14},
        ),
    ],
    ids=["start", "end", "assistant", "completion"],
)
def test_a_cut_that_was_asked_for_is_that_of_trl(
    rows: Dataset, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL's own trainer cuts the same rows to the same tokens and labels, if this release cuts data sets."""
    template = MARKED if "assistant_only_loss" in options else PLAIN
    with caplog.at_level("INFO"):
        trainer = sft(tmp_path, rows, template=template, **options)
    most = options["max_length"]
    assert f"sequences are longer than SFTConfig(max_length={most}), which cut " in caplog.text
    assert max(lengths_of(trainer)) == most

    tokenizer = make_tokenizer(template)
    own = trl.SFTTrainer(
        model=model_of(tokenizer, attention="sdpa"),
        args=trl.SFTConfig(str(tmp_path), **QUIET, **options),
        train_dataset=rows,
        processing_class=tokenizer,
    ).train_dataset
    if max(map(len, own["input_ids"])) > most:
        pytest.skip(f"TRL {trl.__version__} cuts rows when it pads them")
    assert list(trainer.train_dataset["input_ids"]) == list(own["input_ids"])
    assert list(trainer.train_dataset["labels"]) == list(own["labels"])


def cut_on_a_rank(folder: str) -> list[list[int]]:
    return list(sft(Path(folder), conversations(*TALKS), max_length=20).train_dataset["input_ids"])


def test_two_ranks_cut_alike(tmp_path: Path) -> None:
    """The first rank writes the cache of datasets, and the other one waits for it."""
    first, second = run_ranks(cut_on_a_rank, 2, str(tmp_path))
    assert first == second
    assert max(map(len, first)) == 20


def test_a_stream_is_cut_and_its_first_cut_is_reported(tmp_path: Path) -> None:
    stream = conversations(*TALKS, LONG, LONG).to_iterable_dataset()
    trainer = sft(tmp_path, stream)
    with pytest.warns(DataWarning, match="longer than SFTConfig.*which cuts it and all others") as caught:
        lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    assert len([one for one in caught if issubclass(one.category, DataWarning)]) == 1
    assert lengths[len(TALKS) :] == [1_024, 1_024]


def test_a_max_length_that_cannot_be_counted_or_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="SFTConfig: max_length=0; wanted 1 or more. None cuts nothing"):
        sft(tmp_path, conversations(*TALKS), max_length=0)
    monkeypatch.delattr(trl.SFTTrainer, "_prepare_dataset")
    with pytest.raises(PrivateNameGone, match=r"^max_length of packed_trainer\(SFTTrainer\) needs"):
        sft(tmp_path, conversations(*TALKS))


def pairs(*prompt_words: int) -> Dataset:
    texts = ["two plus " * words for words in prompt_words]
    return Dataset.from_list(
        [{"prompt": text, "chosen": "four", "rejected": "red, or green."} for text in texts]
    )


@needs_fused
def test_pairs_that_dpo_cuts_or_leaves_out_are_counted(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(PLAIN)
    rows = pairs(1, 2, 510, 900)  # the third prompt fits, its answers do not; the fourth prompt does not fit
    with pytest.warns(DataWarning, match=r"DPOConfig\(max_length=1024\), TRL's default, which") as caught:
        trainer = packed_trainer(trl.DPOTrainer)(
            model_of(tokenizer),
            model_of(tokenizer),
            args=trl.DPOConfig(str(tmp_path), **QUIET),
            train_dataset=rows,
            eval_dataset={"short": rows.select([0])},
            processing_class=tokenizer,
        )

    whole = [len(tokenizer(row["prompt"] + row["rejected"])["input_ids"]) + 1 for row in rows]
    gone = len(rows) - len(trainer.train_dataset)
    num_cut = sum(length > 1_024 for length in whole) - gone
    [message] = [str(one.message) for one in caught if issubclass(one.category, DataWarning)]
    assert (num_cut, gone) == (1, 1)
    assert message.startswith("train: 2 of 4 pairs are longer than ")
    assert "which cuts 1 and left out 1 of them. Pass max_length=None to keep them whole." in message


def test_pairs_that_a_reward_trainer_leaves_out_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer(PLAIN)
    with caplog.at_level("INFO"):
        packed_trainer(trl.RewardTrainer)(
            model_of(tokenizer, AutoModelForSequenceClassification),
            args=trl.RewardConfig(str(tmp_path), max_length=64, **QUIET),
            train_dataset=pairs(1, 2, 90),
            processing_class=tokenizer,
        )
    said = "train: 1 of 3 pairs are longer than RewardConfig(max_length=64), which left out 1 of them."
    assert said in caplog.text


def test_pairs_that_cannot_be_counted_are_mentioned(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    args = trl.DPOConfig(str(tmp_path), **QUIET)
    with caplog.at_level("INFO"):
        report_cut_pairs("train", pairs(1), pairs(1).to_iterable_dataset(), args)
    assert "train: pairs may be longer than DPOConfig(max_length=1024), TRL's default, which" in caplog.text


def test_a_data_set_of_conversations_says_that_the_users_words_are_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL's default learns all tokens of a data set; a path, the option and text say nothing."""
    said = "every token of the conversations is learned, the user's words too, which is TRL's default."
    with caplog.at_level("INFO"):
        trainer = sft(tmp_path, conversations(*TALKS))
    assert said in caplog.text
    rows = trainer.train_dataset
    assert all(row.get("labels", row["input_ids"]) == row["input_ids"] for row in rows)

    caplog.clear()
    with caplog.at_level("INFO"):
        sft(tmp_path, conversations(*TALKS), template=MARKED, assistant_only_loss=True)
        sft(tmp_path, Dataset.from_list([{"text": "two plus two"}] * 2))
        sft(tmp_path, chats(tmp_path, *TALKS), data_kwargs={"cache_dir": str(tmp_path / "cache")})
    assert said not in caplog.text


@pytest.mark.parametrize("marked", [False, True])
def test_assistant_only_loss_of_a_path_changes_nothing(marked: bool, tmp_path: Path) -> None:
    """A path learns the assistant's tokens with the option and without it, under any chat template."""
    options = {"template": MARKED if marked else PLAIN, "data_kwargs": {"cache_dir": str(tmp_path / "cache")}}
    source = chats(tmp_path, *TALKS)
    without = sft(tmp_path, source, **options)
    trainer = sft(tmp_path, source, assistant_only_loss=True, **options)
    assert trainer.args.assistant_only_loss is True
    assert list(trainer.train_dataset["labels"]) == list(without.train_dataset["labels"])
    learned = [sum(label != -100 for label in labels) for labels in trainer.train_dataset["labels"]]
    assert all(0 < count < length for count, length in zip(learned, lengths_of(trainer), strict=True))
    trainer.train()
    assert torch.isfinite(torch.tensor(trainer.state.log_history[-1]["train_loss"]))


def test_options_that_the_records_of_a_path_contradict_are_refused(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "two plus two"}) + "\n")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "two plus two", "completion": " is four"}) + "\n")
    reading = {"cache_dir": str(tmp_path / "cache")}

    for file, options, message in (
        (texts, {"assistant_only_loss": True}, "'text' records, which have no assistant. Leave the option"),
        (texts, {"completion_only_loss": True}, "'text' records, which have no prompt and completion"),
        (prompts, {"completion_only_loss": False}, "'prompt' records, of which only completions are learned"),
    ):
        with pytest.raises(ValueError, match=message):
            sft(tmp_path, str(file), data_kwargs=reading, **options)
    sft(tmp_path, str(prompts), data_kwargs=reading, completion_only_loss=True)

    tokenizer = make_tokenizer(MARKED)
    with pytest.raises(ValueError, match="But eval_dataset is no path, and TRL prepares both alike"):
        packed_trainer(trl.SFTTrainer)(
            model=model_of(tokenizer),
            args=trl.SFTConfig(str(tmp_path), assistant_only_loss=True, **QUIET),
            train_dataset=chats(tmp_path, *TALKS),
            eval_dataset=conversations(*TALKS),
            processing_class=tokenizer,
            data_kwargs=reading,
            capacity=64,
        )


@needs_fused
def test_trainers_of_pairs_and_groups_refuse_paths() -> None:
    with pytest.raises(
        TypeError, match=r"PackedDPOTrainer got a path as train_dataset.*load_dataset\('json'"
    ):
        packed_trainer(trl.DPOTrainer)(model=None, args=None, train_dataset="pairs.jsonl")
    with pytest.raises(TypeError, match="PackedGRPOTrainer got a path as eval_dataset"):
        packed_trainer(trl.GRPOTrainer)(model=None, args=None, eval_dataset={"a": Path("prompts.jsonl")})


def test_a_missing_capacity_is_explained(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"PackedSFTTrainer needs capacity=\. It is the most tokens of a pack"
    ):
        packed_trainer(trl.SFTTrainer)(args=trl.SFTConfig(str(tmp_path), **QUIET))
