"""The README does what it says: every Python block runs, every command and quoted message exists."""

from __future__ import annotations

import json
import os
import re
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = {page: page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))}
MESSAGES = (ROOT / "docs" / "reference" / "messages.md").read_text()
LEAKS = (ROOT / "docs" / "concepts" / "leaks.md").read_text()
CODE = sorted((ROOT / "lightning_thd").rglob("*.py"))
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
SHELL = [line for block in re.findall(r"```\n(.*?)```", README, re.S) for line in block.splitlines()]


def _limit_steps() -> None:
    """Make what takes a thousand steps in the README take two, on a CPU."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from transformers import TrainingArguments

    trainer = L.Trainer
    check = TrainingArguments.__post_init__
    settings = {"accelerator": "cpu", "enable_model_summary": False, "enable_progress_bar": False}

    def short(**kwargs: Any) -> L.Trainer:
        keeps = any(isinstance(callback, ModelCheckpoint) for callback in kwargs.get("callbacks", ()))
        few = kwargs["max_steps"] if kwargs.get("max_steps") in (1, 2, 3) else 2
        limits = {"logger": kwargs.get("logger", False), "max_steps": few, "enable_checkpointing": keeps}
        return trainer(**{**kwargs, **settings, **limits})

    L.Trainer = short

    def post_init(self: TrainingArguments) -> None:
        self.max_steps = 2
        self.use_cpu = True
        self.report_to = []
        self.disable_tqdm = True
        check(self)

    TrainingArguments.__post_init__ = post_init


def _names() -> dict[str, Any]:
    """What a reader has before a block begins: a model, data, and the imports of the blocks above it."""
    import lightning as L

    from lightning_thd import THDBatch, THDDataModule, THDThroughputMonitor
    from tests.data.chats import PLAIN, make_tokenizer
    from tests.tiny import TinyModule, sequences, tiny_llama

    _limit_steps()
    dataset = sequences(520)
    tokenizer = make_tokenizer(PLAIN)
    model = tiny_llama()
    model.resize_token_embeddings(len(tokenizer))
    ids = torch.randint(0, 64, (3, 12))
    mask = (torch.arange(12) < torch.tensor([[12], [5], [9]])).long()
    return {
        "L": L,
        "torch": torch,
        "THDDataModule": THDDataModule,
        "THDThroughputMonitor": THDThroughputMonitor,
        "dataset": dataset,
        "model": model,
        "config": model.config,
        "module": TinyModule(),
        "batch": THDBatch.collate(sequences(3)),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "tokenizer": tokenizer,
        "input_ids": ids,
        "attention_mask": mask,
        "response_mask": mask * (torch.arange(12) > 2),
    }


def run_block(block: str, folder: str) -> list[str]:
    """Run a block, and a Trainer that it leaves unused too; the names it defines."""
    os.chdir(folder)
    names = _names()
    before = set(names)
    fewer = block.replace("Sequences(512)", "Sequences(32)")
    exec(compile(fewer, "README.md", "exec"), names)  # it is ours
    trainer = names.get("trainer")
    if trainer is not None and trainer.global_step == 0:
        trainer.fit(names["module"], names["THDDataModule"](names["dataset"][:60], capacity=64))
    assert trainer is None or trainer.global_step == 2
    return sorted(set(names) - before)


@pytest.mark.parametrize("block", BLOCKS, ids=[block.strip().splitlines()[-1][:40] for block in BLOCKS])
def test_every_python_block_runs(block: str, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "one document"}\n{"text": "and another"}\n')
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello there"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    devices = re.search(r"devices=(\d)", block)
    run_ranks(run_block, int(devices[1]) if devices else 1, block, str(tmp_path))


def test_every_command_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert len(SHELL) >= 6

    for line in SHELL:
        words = line.split("#")[0].split()
        if words and words[0] == "make":
            assert f"\n{words[1]}:" in makefile
        for word in words:
            if word.startswith(("examples/", "benchmarks/")):
                assert (ROOT / word).exists()
        if "examples/quickstart.py" in words:
            source = (ROOT / "examples" / "quickstart.py").read_text()
            assert all(f'"{word}"' in source for word in words if word.startswith("--"))

    for name in re.findall(r"python -m (benchmarks[.a-z0-9_]*)", README + "".join(DOCS.values())):
        assert any((ROOT / f"{name.replace('.', '/')}{end}").exists() for end in (".py", "/__main__.py"))
    for link in re.findall(r"\]\(([a-zA-Z_/]+\.(?:py|md))\)", README):
        assert (ROOT / link).exists(), link
    for file in re.findall(r"`(tests/[a-z_/]+\.py)`", README):
        assert (ROOT / file).exists(), file


def test_quoted_messages_are_in_the_code() -> None:
    quoted = re.findall(r"^\| `([^`]+)` \|", MESSAGES, re.M)
    assert len(quoted) >= 10
    # Adjacent strings are joined, so that a message that is split over lines is found.
    source = "".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in CODE)
    for message in quoted:
        pattern = ".{1,40}?".join(map(re.escape, re.split(r"\d+", message)))  # numbers are filled in
        assert re.search(pattern, source), message


def test_errors_that_have_a_section_print_its_link() -> None:
    sections = dict(re.findall(r"^## [^\n]* \{#([\w-]+)\}\n(.*?)(?=^## |\Z)", MESSAGES, re.M | re.S))
    printed = re.findall(r"\bsee\(['\"]([\w-]+)['\"]\)", "".join(file.read_text() for file in CODE))
    assert set(printed) == set(sections)
    for anchor, section in sections.items():
        assert printed.count(anchor) <= len(re.findall(r"^\| `", section, re.M)), anchor


def test_a_message_names_the_page_by_its_address_if_the_package_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib.metadata as installed

    from lightning_thd._pages import see

    built = Message()
    monkeypatch.setattr(installed, "metadata", lambda name: built)
    assert see("steps") == "See 'Error messages' (reference/messages.md#steps) in the documentation."
    assert MESSAGES.startswith("# Error messages\n")
    built["Project-URL"] = "Source, https://a/b"
    built["Project-URL"] = "Documentation, https://a/b/tree/main/docs"
    assert see("steps") == "See https://a/b/tree/main/docs/reference/messages.md#steps."


def _zeros(row: list[str]) -> list[str]:
    return [cell if cell in ("0", "refuses") else "leaks" for cell in row]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba2", "bamba"])
def test_the_leak_table_of_trl_is_what_is_measured(name: str) -> None:
    """The columns of the page for the installed release of TRL; other releases skip."""
    from benchmarks.leaks import cell_of, measure_trl

    trl = pytest.importorskip("trl")
    rows = re.findall(rf"^\| (?:\w+, )*{name}\b.*?\| (.*) \|$", LEAKS, re.M)
    old, new, wrapped, ours = rows[0].split(" | ")
    release = trl.__version__.rpartition(".")[0]
    columns = {"1.0": old, "1.9": old, "1.16": new}
    if release not in columns:
        pytest.skip(f"the page has no column of TRL {release}")
    measured = [cell_of(moved) for moved in measure_trl(name).values()]
    assert _zeros(measured) == _zeros([columns[release], wrapped])
    assert ours == "0"


@pytest.mark.parametrize("name", ["llama", "stablelm", "mamba2", "bamba"])
def test_the_leak_table_is_what_is_measured(name: str) -> None:
    from benchmarks.leaks import measure

    *_, row = re.findall(rf"^\| {name} \(.*\) \| (.*) \|$", LEAKS, re.M)  # the first is that of TRL
    measured = ["refuses" if x is None else "0" if x == 0 else "leaks" for x in measure(name).values()]
    assert _zeros(row.split(" | ")) == measured


def test_the_support_table_names_every_family() -> None:
    from tests.models.families import FAMILIES

    section = README.split("## Support")[1]
    assert not [name for name in FAMILIES if not re.search(rf"\b{name}\b", section)]
