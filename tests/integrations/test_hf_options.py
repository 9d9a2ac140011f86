"""Every option of transformers' and TRL's Trainers is honoured, irrelevant to packs, or refused by name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from lightning_thd.integrations import packed_trainer
from lightning_thd.integrations.hf_options import HONOURED, IRRELEVANT, REFUSED, refuse_options
from tests.tiny import sequences, tiny_llama

trl = pytest.importorskip("trl")
# What TRL's own defaults make transformers say.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")

# A value of each option that is refused.
VALUES: dict[str, Any] = {
    "neftune_noise_alpha": 5.0,
    "train_sampling_strategy": "group_by_length",
    "dataloader_in_order": False,
    "dataloader_multiprocessing_context": "spawn",
    "label_names": ["start_positions"],
    "eval_do_concat_batches": False,
    "include_for_metrics": ["loss"],
    "loss_type": "dft",
    "deepspeed": {"zero_optimization": {"stage": 2}},
}


@pytest.mark.parametrize("kind", [TrainingArguments, trl.SFTConfig], ids=lambda kind: kind.__name__)
def test_every_field_is_known(kind: type, tmp_path: Path) -> None:
    names = {field.name for field in dataclasses.fields(kind)}
    assert names <= HONOURED | IRRELEVANT.keys() | REFUSED.keys()
    tables = (HONOURED, IRRELEVANT.keys(), REFUSED.keys())
    assert len(set().union(*tables)) == sum(map(len, tables))
    refuse_options(kind(output_dir=str(tmp_path), use_cpu=True, bf16=False))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_at_construction(name: str, tmp_path: Path) -> None:
    args = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    setattr(args, name, VALUES.get(name, True))
    with pytest.raises(ValueError, match=rf"SFTConfig\({name}=.*\) .+\. (Set|Leave|Use|Lower|Name) "):
        packed_trainer()(model=tiny_llama(), args=args, train_dataset=sequences(4), capacity=64)


def test_an_option_of_a_later_version_is_refused_unless_at_its_default(tmp_path: Path) -> None:
    later: Any = dataclasses.make_dataclass(
        "Later",
        [("new_loss", str, "none")],
        bases=(TrainingArguments,),
        namespace={"__module__": "transformers.x"},
    )
    refuse_options(later(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(ValueError, match=r"Later\(new_loss='focal'\): packed_trainer does not know"):
        refuse_options(later(output_dir=str(tmp_path), use_cpu=True, new_loss="focal"))
    mine: Any = dataclasses.make_dataclass("Mine", [("colour", str, "red")], bases=(TrainingArguments,))
    refuse_options(mine(output_dir=str(tmp_path), use_cpu=True, colour="blue"))


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OwnLoss, r"OwnLoss has a compute_loss\(\) of its own.*Define it in a subclass of packed_trainer"),
        (Seq2SeqTrainer, r"Seq2SeqTrainer has a prediction_step\(\) of its own"),
        (trl.KTOTrainer, r"packed_trainer\(KTOTrainer\).*pairs or groups of sequences: write the loop"),
        (trl.RLOOTrainer, r"packed_trainer\(RLOOTrainer\).*causal_lm_logprobs, as examples/rl_logprobs.py"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_trainers_with_a_loss_of_their_own_are_refused(kind: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_trainer(kind)


def test_several_devices_in_one_process_are_refused(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert args.n_gpu < 2
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"on 2 GPUs from one process.*torchrun --nproc-per-node=2, or show"):
        packed_trainer()(model=tiny_llama(), args=args, train_dataset=sequences(4), capacity=64)


def test_a_loss_of_logits_is_refused(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    given: dict[str, Any] = {
        "model": tiny_llama(),
        "args": args,
        "train_dataset": sequences(4),
        "capacity": 64,
    }
    with pytest.raises(ValueError, match="compute_loss_func is called with logits, which packed_trainer"):
        packed_trainer()(compute_loss_func=lambda outputs, labels, **_: outputs, **given)
    with pytest.raises(ValueError, match="would pad or stack what is packed"):
        packed_trainer()(given.pop("model"), given.pop("args"), lambda rows: rows, **given)


def smoothed_loss(model: nn.Module, samples: list[Any]) -> torch.Tensor:
    """Smooth labels sequence by sequence, from whole logits."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        ids = torch.as_tensor(sample["input_ids"]).long()
        labels = torch.as_tensor(sample["labels"]).long()[1:]
        logp = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        kept = labels != -100
        picked = logp.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
        each = -0.9 * picked - 0.1 * logp.mean(-1)
        total, count = total + each[kept].sum(), count + int(kept.sum())
    return total / count


def test_label_smoothing_changes_the_loss(tmp_path: Path) -> None:
    samples = sequences(9, labels=True)
    args = trl.SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], label_smoothing_factor=0.1
    )
    trainer = packed_trainer()(model=tiny_llama(), args=args, train_dataset=samples, capacity=256)
    [inputs] = trainer.get_train_dataloader()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    model = tiny_llama()
    wanted = smoothed_loss(model, samples)
    wanted.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    for found, parameter in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, parameter.grad, rtol=1e-9, atol=1e-12)
    assert trainer.evaluate(samples)["eval_loss"] == pytest.approx(float(wanted.detach()), rel=1e-12)


def test_messages_name_what_the_table_says() -> None:
    for name, (_, why, remedy) in REFUSED.items():
        assert re.match(r"[a-z]", why), name
        assert not remedy.endswith("."), name


def test_options_without_effect_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        for kind in (TrainingArguments, trl.SFTConfig):
            refuse_options(kind(output_dir=str(tmp_path), use_cpu=True))
        assert "no effect" not in caplog.text
        options: dict[str, Any] = {"per_device_train_batch_size": 2, "eval_accumulation_steps": 3}
        refuse_options(TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options))
    assert "TrainingArguments(per_device_train_batch_size=2) has no effect: a batch is a pack" in caplog.text
    assert "TrainingArguments(eval_accumulation_steps=3) has no effect: predictions move" in caplog.text


def test_another_attention_is_refused_at_construction(tmp_path: Path) -> None:
    model = tiny_llama()
    model.set_attn_implementation("sdpa")
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match=r"'sdpa'.*Call model.set_attn_implementation\('thd'\)"):
        packed_trainer()(model=model, args=args, train_dataset=sequences(4), capacity=64)
    model.set_attn_implementation("thd")
    packed_trainer()(model=model, args=args, train_dataset=sequences(4), capacity=64)
