"""Error messages that no other test meets: what came, what was wanted, what to do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_thd import FlopsModel, THDBatch, THDDataModule, THDDDPStrategy
from lightning_thd.data.read.chat import encode_chat
from lightning_thd.data.store.cache import open_arrays, save_arrays
from lightning_thd.data.streams import Stream
from lightning_thd.flops import SeqStats
from lightning_thd.loss import PackedRollouts, fused_linear_logprobs
from lightning_thd.module import CausalLMModule
from tests.data.chats import MARKED, PLAIN, make_tokenizer
from tests.tiny import tiny_llama

IDS = torch.arange(12).view(2, 6)
MASK = torch.ones(2, 6, dtype=torch.long)
HIDDEN = torch.zeros(3, 4)
QWEN = {"model_type": "qwen3"}
fused = partial(fused_linear_logprobs, weight=torch.zeros(5, 4), targets=torch.zeros(3, dtype=torch.long))


def rollouts() -> PackedRollouts:
    return PackedRollouts.from_padded(IDS, MASK)


def set_up(*rows: dict[str, Any]) -> None:
    THDDataModule(list(rows), capacity=16, tokenizer=make_tokenizer(PLAIN)).setup("fit")


def marked_by_a_slow_tokenizer() -> None:
    slow = SimpleNamespace(chat_template=MARKED, is_fast=False, get_chat_template=lambda tools: MARKED)
    encode_chat(slow, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


def with_attention_weights() -> None:
    batch = THDBatch.collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    tiny_llama()(**batch.hf_kwargs(), output_attentions=True)


def counted_for_another_model() -> None:
    model = FlopsModel.from_config(tiny_llama().config)
    model.training_flops(SeqStats.from_lengths([4], windows=(2,)))


def arrays_of_another_version() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_arrays(Path(folder) / "x", {"a": np.zeros(3)}, version=1)
        open_arrays(Path(folder) / "x", version=2)


SOUND = {"messages": [{"role": "assistant", "content": "b"}], "audio": [1.0]}
READY = {"input_ids": [1, 2, 3], "lengths": [1, 2], "pixel_values": [[1.0]]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: THDBatch.from_padded(IDS, MASK[:, :5]), r"from_padded\(\) got shapes .*wanted one \[B, N\]"),
        (
            lambda: THDBatch.collate([{"labels": [1]}]),
            r"Sample 0 has the keys \['labels'\] but no 'input_ids'",
        ),
        (
            lambda: THDBatch.collate([{"input_ids": [1.5]}]),
            "Sample 0: input_ids holds float64 values; wanted",
        ),
        (lambda: PackedRollouts.from_padded(IDS, MASK[:1]), r"shapes \[\[2, 6\], \[1, 6\], \[1, 6\]\] for"),
        (lambda: rollouts().pack(torch.zeros(2, 5)), r"pack\(\) got \[2, 5\], wanted \[2, 6, \.\.\.\]"),
        (
            lambda: fused(HIDDEN.long()),
            "hidden is torch.int64 and weight torch.float32, wanted one dtype of fp32, fp64, bf16 and fp16",
        ),
        (lambda: fused(HIDDEN, bias=torch.zeros(4)), r"bias is \[4\], wanted \[5\], one per row of weight"),
        (
            lambda: fused(HIDDEN, rows=torch.zeros(2)),
            r"rows is torch.float32 \[2\], wanted int64 \[R\] or bool",
        ),
        (counted_for_another_model, r"The stats count windows \[2\], but 'llama' has none"),
        (
            lambda: CausalLMModule(config=QWEN).training_step(None, 0),
            r"is not built yet. Call configure_model",
        ),
        (lambda: CausalLMModule(), "got model=None and config=None. Give exactly one of them"),
        (
            lambda: CausalLMModule("org/model", config=QWEN),
            "got model=a str, 'org/model' and config=a dict, ",
        ),
        (lambda: CausalLMModule("./none"), r"./none does not exist. Pass the folder of a saved model"),
        (
            lambda: CausalLMModule("org/model", warmup_fraction=1.5),
            "warmup_fraction=1.5; wanted a share of all",
        ),
        (lambda: CausalLMModule("org/model", compile="model"), "compile='model'; wanted one of off, layers"),
        (lambda: CausalLMModule(config={"vocab_size": 8}), "it names no model_type, for example"),
        (marked_by_a_slow_tokenizer, "which only a fast tokenizer can follow"),
        (lambda: set_up(SOUND), "'audio' was found"),
        (lambda: set_up(READY), "Row 0 carries pixel_values, which cannot be divided"),
        (with_attention_weights, "passes output_attentions .* or use attn_implementation='eager'"),
        (
            lambda: THDDataModule([], batch_size=8),
            "has no batch_size=. A batch is a pack of at most capacity=",
        ),
        (
            lambda: THDDataModule([], capacity=8, step=4),
            r"has no step=. What a step holds is global_batch=Packs\(n\) or global_batch=Sequences\(n\)",
        ),
        (lambda: THDDataModule([]), "needs capacity=. It is the most tokens of a pack, for example"),
        (lambda: Stream("x", text_key="body"), r"has no text_key=. Pass it to THDDataModule\(Stream"),
        (
            lambda: THDDDPStrategy(tensor_parallel_size=2),
            "has no tensor_parallel_size=: .*THDModelParallelStrategy",
        ),
        (arrays_of_another_version, "it has version 1, wanted 2.*Delete it to build it again"),
    ],
)
def test_message(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        call()
