"""Error messages that no other test meets: what came, what was wanted, what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_thd import FlopsModel, THDBatch, THDDataModule
from lightning_thd.data.read.chat import encode_chat
from lightning_thd.data.store.cache import open_arrays, save_arrays
from lightning_thd.flops import SeqStats
from lightning_thd.loss import PackedRollouts, fused_linear_logprobs
from lightning_thd.module import CausalLMModule
from lightning_thd.packing import PackPlanner, Sequences
from tests.data.chats import MARKED, PLAIN, make_tokenizer
from tests.tiny import tiny_llama

IDS, MASK = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.long)
HIDDEN, WEIGHT, TARGETS = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.long)


def rollouts() -> PackedRollouts:
    return PackedRollouts.from_padded(IDS, MASK)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "padded rows of other shapes": (
        lambda: THDBatch.from_padded(IDS, MASK[:, :5]),
        r"from_padded\(\) got shapes \[\[2, 6\], \[2, 5\], \[2, 6\]\].*wanted one \[B, N\]",
    ),
    "sample without ids": (
        lambda: THDBatch.collate([{"labels": [1]}]),
        r"Sample 0 has the keys \['labels'\] but no 'input_ids'",
    ),
    "sample of floats": (
        lambda: THDBatch.collate([{"input_ids": [1.5]}]),
        "Sample 0: input_ids holds float64 values; wanted whole numbers. Give one row of integers",
    ),
    "rollouts of other shapes": (
        lambda: PackedRollouts.from_padded(IDS, MASK[:1]),
        r"shapes \[\[2, 6\], \[1, 6\], \[1, 6\]\] for input_ids, attention_mask and response_mask",
    ),
    "values of other shapes": (
        lambda: rollouts().pack(torch.zeros(2, 5)),
        r"pack\(\) got \[2, 5\], wanted \[2, 6, \.\.\.\]",
    ),
    "integer hidden states": (
        lambda: fused_linear_logprobs(HIDDEN.long(), WEIGHT, TARGETS),
        "hidden is torch.int64 and weight torch.float32, wanted one dtype of fp32, fp64, bf16 and fp16",
    ),
    "bias of another length": (
        lambda: fused_linear_logprobs(HIDDEN, WEIGHT, TARGETS, bias=torch.zeros(4)),
        r"bias is \[4\], wanted \[5\], one a row of weight",
    ),
    "rows of floats": (
        lambda: fused_linear_logprobs(HIDDEN, WEIGHT, TARGETS, rows=torch.zeros(2)),
        r"rows is torch.float32 \[2\], wanted int64 \[R\] or bool \[3\]",
    ),
    "windows of another model": (
        lambda: FlopsModel.from_config(tiny_llama().config).training_flops(
            SeqStats.from_lengths([4], windows=(2,))
        ),
        r"The stats count windows \[2\], but 'llama' has none.*windows=flops_model.windows",
    ),
    "module that is not built": (
        lambda: CausalLMModule(config={"model_type": "qwen3"}).training_step(None, 0),
        r"The model is not built yet. Call configure_model\(\) first",
    ),
    "neither model nor config": (
        lambda: CausalLMModule(),
        "CausalLMModule got model=None and config=None. Give exactly one of them",
    ),
    "model and config": (
        lambda: CausalLMModule("org/model", config={"model_type": "qwen3"}),
        "got model=a str, 'org/model' and config=a dict, .* Give exactly one of them",
    ),
    "model that is not there": (
        lambda: CausalLMModule("./none"),
        r"./none does not exist. Pass the folder of a saved model, or its name; .* config=\{...\}",
    ),
    "model without weights": (
        lambda: CausalLMModule(str(Path(__file__).with_name("signatures.json"))),
        "signatures.json' is a file, which holds no weights. Pass the folder",
    ),
    "a warm-up longer than the run": (
        lambda: CausalLMModule("org/model", warmup_fraction=1.5),
        "warmup_fraction=1.5; wanted a share of all steps or of lr, from 0 to 1",
    ),
    "config without a type": (
        lambda: CausalLMModule(config={"vocab_size": 8}),
        "it names no model_type, for example",
    ),
    "scheduler that uses a sequence twice": (
        lambda: PackPlanner(
            [4, 4],
            8,
            global_batch=Sequences(2),
            scheduler=lambda lengths, capacity, **_: [[np.array([0, 0])]],
        ).step(0, 0, 1),
        "used 2 positions, up to 0, for 2 sequences. It must put each position in the lengths it was",
    ),
    "slow tokenizer for a marked template": (
        lambda: encode_chat(
            SimpleNamespace(chat_template=MARKED, is_fast=False, get_chat_template=lambda tools: MARKED),
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
        "only a fast tokenizer can follow, and SimpleNamespace is none",
    ),
    "sound in a conversation": (
        lambda: _setup([{"messages": [{"role": "assistant", "content": "b"}], "audio": [1.0]}]),
        "'audio' was found",
    ),
    "images beside a ready pack": (
        lambda: _setup([{"input_ids": [1, 2, 3], "lengths": [1, 2], "pixel_values": [[1.0]]}]),
        "Row 0 holds several sequences and carries pixel_values, which is not known to belong",
    ),
    "attention weights": (
        lambda: tiny_llama()(**_batch().hf_kwargs(), output_attentions=True),
        "packed kernels never form. Use attn_implementation='eager' to look at weights",
    ),
}


def _setup(rows: list[dict[str, Any]]) -> None:
    THDDataModule(rows, capacity=16, tokenizer=make_tokenizer(PLAIN)).setup("fit")


def _batch() -> THDBatch:
    return THDBatch.collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])


@pytest.mark.parametrize("case", CASES)
def test_message(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises((ValueError, RuntimeError), match=message):
        call()


def test_arrays_of_another_version(tmp_path: Path) -> None:
    save_arrays(tmp_path / "x", {"a": np.zeros(3)}, version=1)
    with pytest.raises(ValueError, match=r"version 1 was found, 2 wanted.*Delete it; it is built again"):
        open_arrays(tmp_path / "x", version=2)
