"""What packs cannot do under transformers' and TRL's Trainers is refused by name."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.functional import cross_entropy
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from lightning_thd import Packs, Sequences
from lightning_thd.integrations import packed_trainer
from lightning_thd.integrations.hf_options import (
    HONOURED,
    IRRELEVANT,
    REFUSED,
    refuse_engines,
    refuse_options,
)
from tests.tiny import largest_error, sequences, tiny_llama

trl = pytest.importorskip("trl")
# What TRL's own defaults make transformers say.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")

# A value of each option that is refused; True where none is named.
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


def make(out: Path, kind: type = Trainer, *, args: Any = None, **given: Any) -> Any:
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, **(args or {})}
    given = {"train_dataset": sequences(4), "capacity": 64, "peak": 1e9, "model": tiny_llama(), **given}
    return packed_trainer(kind)(args=TrainingArguments(str(out), **settings), **given)


@pytest.mark.parametrize("kind", [TrainingArguments, trl.SFTConfig], ids=lambda kind: kind.__name__)
def test_every_field_is_known(kind: type, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = {field.name for field in dataclasses.fields(kind)}
    tables = (HONOURED, IRRELEVANT, REFUSED.keys())
    assert names <= set().union(*tables)
    assert len(set().union(*tables)) == sum(map(len, tables))
    with caplog.at_level("INFO"):
        refuse_options(kind(output_dir=str(tmp_path), use_cpu=True, bf16=False))
        assert "no effect" not in caplog.text
        options: dict[str, Any] = {"per_device_train_batch_size": 2, "bf16": False}
        refuse_options(kind(output_dir=str(tmp_path), use_cpu=True, **options))
    assert f"{kind.__name__}(per_device_train_batch_size=2) has no effect on packs" in caplog.text


def test_options_are_refused_by_name(tmp_path: Path) -> None:
    for name in REFUSED:
        args = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
        setattr(args, name, VALUES.get(name, True))
        with pytest.raises(ValueError, match=rf"SFTConfig\({name}=.*\) .+\. (Set|Leave|Use|Lower|Name) "):
            packed_trainer()(model=tiny_llama(), args=args, train_dataset=sequences(4), capacity=64)

    with pytest.raises(ValueError, match="peak='mesure' is not a device's dense FLOP/s"):
        make(tmp_path, peak="mesure")
    bases = (TrainingArguments,)
    fields: Any = [("new_loss", str, "none")]
    later: Any = dataclasses.make_dataclass("Later", fields, bases=bases)
    later.__module__ = "transformers.x"  # Python 3.12 sets it to the caller's
    refuse_options(later(output_dir=str(tmp_path), use_cpu=True))

    with pytest.raises(ValueError, match=r"Later\(new_loss='focal'\): packed_trainer does not know"):
        refuse_options(later(output_dir=str(tmp_path), use_cpu=True, new_loss="focal"))
    mine: Any = dataclasses.make_dataclass("Mine", [("colour", str, "red")], bases=bases)
    refuse_options(mine(output_dir=str(tmp_path), use_cpu=True, colour="blue"))


def apply_standin(rms_norm: bool = True, fused_linear_cross_entropy: bool = True, model: Any = None) -> None:
    """Patch a model as Liger does: other code with the same results, and a loss that must not be used."""
    APPLIED.append(("rms_norm", rms_norm))
    for module in model.modules():
        if rms_norm and type(module).__name__ == "LlamaRMSNorm":
            module.forward = MethodType(norm_standin, module)
    if fused_linear_cross_entropy:
        raise AssertionError("Liger's loss would replace that of packs")


def norm_standin(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    APPLIED.append(("norm", True))
    return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


APPLIED: list[tuple[str, bool]] = []


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a stand-in of liger-kernel with the names that transformers and packed_trainer take."""

    def to_instance(model: Any, **options: Any) -> None:
        parameters = inspect.signature(apply_standin).parameters
        apply_standin(model=model, **{name: value for name, value in options.items() if name in parameters})

    APPLIED.clear()
    patch: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply_standin}
    package: Any = ModuleType("liger_kernel.transformers")
    package.monkey_patch = patch
    package._apply_liger_kernel_to_instance = to_instance
    for module in (ModuleType("liger_kernel"), package, patch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)


@pytest.mark.usefixtures("liger")
def test_ligers_layers_train_and_its_losses_are_left_out(tmp_path: Path) -> None:
    trained = []
    for options in ({}, {"use_liger_kernel": True}):
        torch.manual_seed(0)
        trainer = make(tmp_path, args={"max_steps": 3, "optim": "sgd", "learning_rate": 0.1, **options})
        trainer.train()
        trained.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    assert APPLIED[0] == ("rms_norm", True)
    assert len(APPLIED) > 1
    assert largest_error(*trained) < 1e-5  # fp32


@pytest.mark.usefixtures("liger")
def test_what_liger_would_leave_out_without_a_word_is_refused(tmp_path: Path) -> None:
    on: dict[str, Any] = {"use_liger_kernel": True}
    with pytest.raises(ValueError, match=r"liger_kernel_config has \['ropes'\].*takes \['rms_norm'\]"):
        make(tmp_path, args={**on, "liger_kernel_config": {"ropes": True}}).train()
    with pytest.raises(ValueError, match="without use_liger_kernel=True would have no effect"):
        make(tmp_path, args={"liger_kernel_config": {"rms_norm": True}})
    sys.modules["liger_kernel.transformers.monkey_patch"].MODEL_TYPE_TO_APPLY_LIGER_FN = {}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="has no layers for model_type='llama'. Leave it at False"):
        make(tmp_path, args=on).train()


def test_liger_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ModuleNotFoundError, match="use_liger_kernel=True needs the package 'liger_kernel"):
        make(tmp_path, args={"use_liger_kernel": True}).train()


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not reached")


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not reached")


Drawn = type("Drawn", (Trainer,), {"_get_train_sampler": None})
OfTRL = type("OfTRL", (OwnStep,), {**vars(OwnStep), "__module__": "trl.x"})  # as OnlineDPOTrainer


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OfTRL, r"OfTRL has a training_step\(\) of its own.*write the loop with prepare_thd"),
        (OwnLoss, r"OwnLoss has a compute_loss\(\) of its own.*Define it in a subclass of packed_trainer"),
        (Seq2SeqTrainer, r"Seq2SeqTrainer has a prediction_step\(\) of its own.*Define compute_loss"),
        (Drawn, r"Drawn has a _get_train_sampler\(\) of its own.*The plan decides the order"),
        (trl.KTOTrainer, r"packed_trainer\(KTOTrainer\).*pairs or groups of sequences: write the loop"),
        (dict, "trainer_class is a type, .*; wanted transformers.Trainer or a subclass"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_trainers_with_a_loss_of_their_own_are_refused(kind: type, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        packed_trainer(kind)
    assert issubclass(packed_trainer(OwnStep), OwnStep)
    with pytest.raises(ValueError, match=r"Drawn has a _get_train_sampler\(\), which packs never call"):
        type("Mine", (Drawn, packed_trainer()), {})


Images = type("Images", (Trainer,), {"__module__": "trl.x"})  # as SFTTrainer
IMAGES = Dataset.from_list([{"input_ids": [1, 2], "images": ["a.png"]}] * 4)


def other_attention() -> Any:
    model: Any = tiny_llama()
    model.set_attn_implementation("sdpa")
    return model


def test_what_a_constructor_refuses(tmp_path: Path) -> None:
    of_n: dict[str, Any] = {"data_kwargs": {"global_batch": Sequences(4)}}
    for arguments, message in (
        (
            {"compute_loss_func": lambda *_, **__: 0},
            "compute_loss_func is called with logits, which packed_trainer never makes",
        ),
        ({"data_collator": lambda rows: rows}, "would pad packs"),
        (
            {"data_kwargs": {"val": [{"input_ids": [1, 2]}]}},
            "'val', which nothing would read. Pass eval_dataset=",
        ),
        (
            {"kind": Images, "train_dataset": IMAGES.to_iterable_dataset(), "args": {"max_steps": 1}},
            "The dataset has images",
        ),
        (
            {"kind": Images, "train_dataset": IMAGES},
            "The dataset has images, which TRL prepares batch by batch in its collator. Use THDDataModule",
        ),
        ({"model": other_attention()}, r"'sdpa'.*Call model.set_attn_implementation\('thd'\)"),
        (
            {"args": {"gradient_accumulation_steps": 3}, **of_n},
            "gradient_accumulation_steps=3: a step of n sequences has as many microbatches as it needs",
        ),
        (
            {"args": {"optim": "lomo"}, **of_n},
            "with optim='lomo', which steps in every backward pass: once a microbatch here",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make(tmp_path, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        (
            "auto",
            "'auto' needs Lightning's Trainer.*transformers' Trainer.* Pass a number",
        ),
        ("8192", "capacity is a str, '8192'; wanted"),
        (0, "capacity=0; wanted 1 or more"),
    ],
)
def test_a_capacity_that_is_no_number_is_refused_by_the_constructor(
    capacity: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError, MisconfigurationException), match=message):
        make(tmp_path, capacity=capacity)


def test_the_page_of_messages_has_the_words_of_a_sequence_that_is_too_long(tmp_path: Path) -> None:
    """``in_data_kwargs`` changes the message, so that a search for it has to find the page too."""
    trainer = make(tmp_path, train_dataset=sequences(4), capacity=2)
    with pytest.raises(ValueError, match="tokens but at most 2 fit a pack") as caught:
        trainer.get_train_dataloader()
    words = str(caught.value).partition("at most 2 ")[2].partition(", 'split'")[0]
    page = Path(__file__).parents[2] / "docs" / "reference" / "messages.md"
    assert words == "fit a pack. Set data_kwargs={'oversize': 'truncate'}"
    assert words in page.read_text()


def test_engines_and_devices_are_refused() -> None:
    mesh = SimpleNamespace(cp_enabled=True, sp_enabled=False, tp_enabled=False)
    engine: Any = SimpleNamespace(
        args=SimpleNamespace(n_gpu=2),
        is_deepspeed_enabled=True,
        accelerator=SimpleNamespace(parallelism_config=mesh),
    )
    with pytest.raises(ValueError, match=r"on 2 GPUs from one process .*torchrun --nproc-per-node=2"):
        refuse_engines(engine)
    engine.args.n_gpu = 1
    with pytest.raises(ValueError, match="Accelerate's configuration starts DeepSpeed, which .*\\. [A-Z]"):
        refuse_engines(engine)
    engine.is_deepspeed_enabled = False
    with pytest.raises(ValueError, match="context parallelism would let documents see each other"):
        refuse_engines(engine)


ROWS = Dataset.from_list([{"input_ids": [5, 6]}])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3.5, "type .float. has no len"),
        (None, "has no dataset to pack. Pass train_dataset"),
        (DatasetDict(train=ROWS, test=ROWS), r"keys \['train', 'test'\] is not a dataset"),
        ({"input_ids": [[5, 6]]}, r"A dict with the keys \['input_ids'\] is not a dataset"),
        ([{"text": "a"}], r"Row 0 of the dataset has the keys \['text'\] and no input_ids\. Tokenise it"),
        (["a"], r"Row 0 of the dataset has the keys \['text'\] and no input_ids\. Tokenise it"),
        ({"attention_mask": [1, 1, 1, 0]}, "4 input_ids and an attention_mask .* that is not all ones"),
        ({"position_ids": [0, 1, 0, 1]}, "Row 1 .* position_ids that do not count from 0 to 3"),
        ({"position_ids": [[0, 1, 2, 3]] * 3}, "Row 1 .* position_ids that do not count from 0 to 3"),
        ({"seq_lengths": [2, 2]}, "Row 1 .* carries seq_lengths, which marks several sequences in a row"),
        ({"loss_mask": [0, 0, 1, 1]}, "'loss_mask', which is not read, so the tokens that it hides"),
        ({"token_type_ids": [0, 1, 1, 0]}, "Row 1 .* has token_type_ids, which a model takes"),
        ({"inputs_embeds": [[0.0]] * 4}, "Row 1 .* has inputs_embeds, which a model takes"),
    ],
    ids=str,
)
def test_datasets_that_are_none_and_columns_that_would_be_left_out(
    given: Any, message: str, tmp_path: Path
) -> None:
    trainer = make(tmp_path)
    if type(given) is dict and "input_ids" not in given:
        given = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [5, 6, 7, 8], **given}]
        with pytest.raises(ValueError, match=message):
            trainer.evaluate(given)
    trainer.train_dataset = given
    with pytest.raises((TypeError, ValueError), match=message):
        trainer.train()


def test_what_a_training_set_and_a_loss_refuse(tmp_path: Path) -> None:
    packs = make(tmp_path, args={"gradient_accumulation_steps": 2}, data_kwargs={"global_batch": Packs(3)})
    with pytest.raises(Exception, match="x gradient_accumulation_steps=2 make 2 packs a step"):
        packs.get_train_dataloader()
    short = make(tmp_path, capacity=8)
    with pytest.raises(
        ValueError, match=r"Set data_kwargs={'oversize': 'truncate'}, 'split', 'drop' or 'own_pack'"
    ):
        short.get_train_dataloader()
    trainer = make(tmp_path)
    (inputs, *_) = trainer.get_train_dataloader()
    with pytest.raises(
        ValueError, match=r"compute_loss\(return_outputs=True\) wants logits, which packed_trainer"
    ):
        trainer.compute_loss(trainer.model, inputs, return_outputs=True)


def test_label_smoothing_and_weights_of_rows_change_the_loss(tmp_path: Path) -> None:
    samples = [{**s, "weights": i / 4} for i, s in enumerate(sequences(9, labels=True))]
    model = tiny_llama()
    args = {"label_smoothing_factor": 0.1}
    trainer = make(tmp_path, args=args, train_dataset=samples, capacity=256)
    [inputs] = trainer.get_train_dataloader()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    logits = [model(input_ids=torch.as_tensor(s["input_ids"])[None]).logits[0, :-1] for s in samples]
    labels = torch.cat([torch.as_tensor(s["labels"])[1:] for s in samples]).long()
    losses = cross_entropy(torch.cat(logits), labels, label_smoothing=0.1, reduction="none")
    weights = torch.cat([torch.full((len(s["labels"]) - 1,), s["weights"]) for s in samples]) * (labels >= 0)
    expected = (losses * weights).sum() / weights.sum()
    expected.backward()

    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    for actual, parameter in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, parameter.grad, rtol=1e-9, atol=1e-12)
    assert trainer.evaluate(samples)["eval_loss"] == pytest.approx(float(expected.detach()), rel=1e-12)
