"""Messages about what Hugging Face's Trainer and other loops cannot run, which no other test here meets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from lightning_thd.integrations import packed_trainer
from lightning_thd.integrations.hf_options import refuse_engines
from lightning_thd.integrations.packed_loop import share_packs
from lightning_thd.precision import convert_linear
from tests.ranks import pretended_ranks
from tests.tiny import sequences, tiny_llama


def test_another_class() -> None:
    with pytest.raises(
        TypeError, match="trainer_class is a type, .*; wanted transformers.Trainer or a subclass"
    ):
        packed_trainer(dict)


def test_engines_and_devices() -> None:
    mesh = SimpleNamespace(cp_enabled=True, sp_enabled=False, tp_enabled=False)
    engine: Any = SimpleNamespace(
        args=SimpleNamespace(n_gpu=1),
        is_deepspeed_enabled=True,
        accelerator=SimpleNamespace(parallelism_config=mesh),
    )
    with pytest.raises(ValueError, match="Accelerate's configuration starts DeepSpeed, which .*\\. [A-Z]"):
        refuse_engines(engine)
    engine.is_deepspeed_enabled = False
    with pytest.raises(ValueError, match="context parallelism would let documents see each other"):
        refuse_engines(engine)
    engine.args.n_gpu = 2
    with pytest.raises(
        ValueError, match=r"would run on 2 GPUs from one process .*torchrun --nproc-per-node=2"
    ):
        refuse_engines(engine)


class Images(Trainer):
    """Has found, as TRL's SFTTrainer does, that its dataset has images."""

    _is_vision_dataset = True


def test_a_dataset_with_images(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="The dataset has images, which TRL prepares batch by batch in its"):
        packed_trainer(Images)(model=tiny_llama(), args=args, train_dataset=sequences(4), capacity=64)


def test_ranks_that_cannot_share_packs() -> None:
    cpu = torch.device("cpu")
    how: Any = {"device": cpu, "size": 2, "layout": "dual_chunk", "communication": "auto"}
    model = tiny_llama()
    with pretended_ranks(4):
        with pytest.raises(
            ValueError, match="=2 where 2 of 4 processes read different data: other axes of the"
        ):
            share_packs(model, data=(0, 2, None), **how)
        convert_linear(model.float(), engine="torchao", emulate=True)
        with pytest.raises(
            ValueError, match="=2 with a model in FP8, whose packs are aligned for one rank. Use"
        ):
            share_packs(model, data=(0, 4, None), **how)


def test_outputs_of_a_loss_without_logits(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = packed_trainer()(model=tiny_llama(), args=args, train_dataset=sequences(4), capacity=64)
    (inputs, *_) = trainer.get_train_dataloader()
    with pytest.raises(ValueError, match=r"compute_loss\(return_outputs=True\) wants logits, which packed"):
        trainer.compute_loss(trainer.model, inputs, return_outputs=True)
