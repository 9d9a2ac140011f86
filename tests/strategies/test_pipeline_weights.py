"""Models built without memory: a rank reads and draws the weights of its own layers alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lightning_thd import Packs, Sequences
from tests.ranks import run_ranks
from tests.strategies.jobs import (
    INTERLEAVED,
    Job,
    Layout,
    data,
    family_model,
    full_parameters,
    make_trainer,
    strict_warnings,
)
from tests.tiny import sequences


class Later(Job):
    """Builds its model in ``configure_model``: on the meta device, or of a folder."""

    def __init__(self, family: str, folder: str | None, wrap: bool = False) -> None:
        super().__init__(family)
        self.model: Any = None
        self.family, self.folder, self.wrap = family, folder, wrap

    def configure_model(self) -> None:
        if self.model is not None:
            return
        if self.folder is None:
            with torch.device("meta"):
                self.model = family_model(self.family)
        else:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                self.folder,
                attn_implementation="thd",
                dtype=torch.float64,
                experts_implementation="eager",
            ).train()
        if self.wrap:
            peft = pytest.importorskip("peft")
            how = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
            self.model = peft.get_peft_model(self.model, how, autocast_adapter_dtype=False)


class Reads:
    """A safetensors file that counts the elements that are read of it."""

    elements = 0

    def __init__(self, file: Any) -> None:
        self.file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Any:
        return Reads(self.file.__enter__())

    def __exit__(self, *args: object) -> None:
        self.file.__exit__(*args)

    def get_slice(self, name: str) -> Any:
        return ReadSlice(self.file.get_slice(name))


class ReadSlice:
    def __init__(self, part: Any) -> None:
        self.part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def __getitem__(self, at: Any) -> Any:
        found = self.part[at]
        Reads.elements += found.numel()
        return found


def fit(family: str, folder: str | None, layout: Layout, steps: int, wrap: bool = False) -> dict[str, Any]:
    strict_warnings()
    warnings.filterwarnings(
        "ignore", message="`is_gradient_checkpointing`", category=FutureWarning
    )  # PEFT asks
    from transformers import modeling_utils

    patch = pytest.MonkeyPatch()
    opened = modeling_utils.safe_open
    patch.setattr(modeling_utils, "safe_open", lambda *args, **kwargs: Reads(opened(*args, **kwargs)))
    Reads.elements = 0
    torch.manual_seed(3)
    module = Later(family, folder, wrap)
    trainer = make_trainer(layout, max_steps=steps)
    if steps:
        trainer.fit(module, data(Sequences(12)))
    else:
        trainer.validate(module, data(Packs(layout.dp), val=sequences(12, seed=3)), verbose=False)
    patch.undo()
    buffers = {name: value for name, value in module.model.named_buffers() if value.is_floating_point()}
    return {
        "params": full_parameters(module.model),
        "buffers": {name: value.clone() for name, value in buffers.items()},
        "losses": module.losses,
        "read": Reads.elements,
    }


def compare(found: list[dict[str, Any]], wanted: dict[str, Any], tolerance: float) -> None:
    seen: set[str] = set()
    for rank in found:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-10)
        for kind in ("params", "buffers"):
            for name, value in rank[kind].items():
                tied = [n for n in wanted[kind] if n.endswith(("embed_tokens.weight", "wte.weight"))]
                whole = name if name in wanted[kind] else tied[0]  # the head's
                torch.testing.assert_close(value, wanted[kind][whole], rtol=tolerance, atol=tolerance)
                seen.add(whole)
    assert seen == {*wanted["params"], *wanted["buffers"]}


def save(family: str, folder: Path) -> nn.Module:
    model: Any = family_model(family)
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    model.save_pretrained(folder, max_shard_size="40KB")
    return model


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3@4t", Layout(pp=2)),
        pytest.param("qwen3_moe@4", Layout(pp=2, options=INTERLEAVED), marks=pytest.mark.slow),
    ],
)
def test_a_stage_reads_its_own_tensors_alone(tmp_path: Path, family: str, layout: Layout) -> None:
    whole = save(family, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    (wanted,) = run_ranks(fit, 1, family, str(tmp_path), Layout(), 1)
    found = run_ranks(fit, 2, family, str(tmp_path), layout, 1)
    compare(found, wanted, 1e-10)
    for rank in found:
        own = sum(value.numel() for value in rank["params"].values())
        assert rank["read"] == own < wanted["read"]
    assert wanted["read"] == sum(p.numel() for p in whole.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "lora"])
def test_weights_drawn_on_stages_are_those_of_the_whole_model(wrap: bool) -> None:
    (wanted,) = run_ranks(fit, 1, "qwen3@4t", None, Layout(), 2, wrap)
    compare(run_ranks(fit, 2, "qwen3@4t", None, Layout(pp=2), 2, wrap), wanted, 1e-10)
    assert float(wanted["params"][next(iter(wanted["params"]))].std()) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("reads", [False, True], ids=["drawn", "read"])
@pytest.mark.parametrize("family", ["llama@4", "gpt2", "qwen3_moe@4", "lfm2@4", "gemma3@4t", "bamba@4"])
def test_weights_of_other_families(tmp_path: Path, family: str, reads: bool) -> None:
    if reads:
        save(family, tmp_path)
    folder = str(tmp_path) if reads else None
    (wanted,) = run_ranks(fit, 1, family, folder, Layout(), 0)
    compare(run_ranks(fit, 2, family, folder, Layout(pp=2), 0), wanted, 0.0)


class Large(Later):
    """218 MB in 16 layers; notes how much memory this rank has held before its first pass."""

    def __init__(self, folder: str | None) -> None:
        super().__init__("qwen3", folder)
        self.grown = 0

    def configure_model(self) -> None:
        if self.folder is not None:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                self.folder, attn_implementation="thd", dtype=torch.float32
            )
            return
        with torch.device("meta"):
            self.model = large_model()

    def on_validation_start(self) -> None:
        self.grown = memory("VmHWM")


def large_model() -> nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=16,
        head_dim=64,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="thd", dtype=torch.float32
    )


def memory(name: str) -> int:
    """Read one of the kernel's figures of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def grow(folder: str | None) -> int:
    warnings.filterwarnings("ignore")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = memory("VmRSS")
    module = Large(folder)
    make_trainer(Layout(pp=4), limit_val_batches=1).validate(
        module, data(Packs(1), val=sequences(12, seed=3)), verbose=False
    )
    return module.grown - before


@pytest.mark.slow
@pytest.mark.parametrize("reads", [False, True], ids=["drawn", "read"])
def test_a_rank_never_holds_the_whole_model(
    tmp_path: Path, reads: bool, record_property: Callable[[str, object], None]
) -> None:
    whole: Any = large_model()
    size = sum(parameter.nbytes for parameter in whole.parameters())
    if reads:
        whole.save_pretrained(tmp_path, max_shard_size="20MB")
    del whole
    found = run_ranks(grow, 4, str(tmp_path) if reads else None)
    record_property("most memory of a rank over the model's", max(found) / size)
    assert max(found) < 0.7 * size  # a quarter, as much of mapped files, and what FSDP2 copies
