"""The console script, in this process: what it runs, prints and refuses."""

from __future__ import annotations

import re
from pathlib import Path

import jsonargparse
import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI

from lightning_thd import Packs, Sequences, THDDataModule, __version__
from lightning_thd.cli import main
from lightning_thd.cli.main import TOOLS
from lightning_thd.module import CausalLMModule
from lightning_thd.report import read_metrics
from tests.cli.test_tools import SIZES, Said

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "yaml.md"


# LightningCLI 2.6.6 calls what jsonargparse 4.53 deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quickstart_yaml_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "examples" / "quickstart.yaml").read_text()
    config = tmp_path / "q.yaml"
    changes = {"runs/": f"{tmp_path}/", "max_steps: 100": "max_steps: 2"}
    changes |= {"capacity: 8192": "capacity: 2500", "hidden_size: 256": "hidden_size: 32"}
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    monkeypatch.setattr("sys.argv", ["lightning-thd", "fit", "--config", str(config)])
    main()
    series = read_metrics(tmp_path / "quickstart-yaml")
    assert [step for step, _ in series["train/loss"]] == [0, 1]


def parsed(text: str, folder: Path) -> THDDataModule:
    """Build the data module of a YAML config, as LightningCLI does."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(THDDataModule, "data")
    file = folder / "data.yaml"
    file.write_text(text)
    made = parser.instantiate_classes(parser.parse_args(["--config", str(file), "--data.capacity=64"]))
    datamodule: THDDataModule = made.data
    return datamodule


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_printed_config_says_the_same_data_again() -> None:
    whole, mixture, stream, _ = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.S)
    several = "data: {train: [my.jsonl, code.jsonl], val: my.jsonl, capacity: 64}"
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(THDDataModule, "data")
    for text in (whole, mixture, stream, several):
        config = parser.parse_object({"data": yaml.safe_load(text)["data"]})
        assert parser.parse_string(parser.dump(config)) == config


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_files_of_the_guide_build_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my", "code", "prose"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "abc"}\n' * 4)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "0.jsonl").write_text('{"text": "abc"}\n' * 4)
    whole, mixture, stream, devices = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.S)
    monkeypatch.setattr("sys.argv", ["", "--config", whole])
    made = LightningCLI(
        CausalLMModule, THDDataModule, subclass_mode_model=True, run=False, save_config_callback=None
    )

    assert made.datamodule.global_batch == Sequences(64)
    data = parsed(mixture, tmp_path)
    data.setup("fit")

    assert len({i for batch in data.train_dataloader() for i in batch.sequence_ids}) == 8
    assert len(data.val_dataloader()) == 2

    data = parsed(stream, tmp_path)
    data.setup("fit")
    assert sum(len(batch.sequence_ids) for batch in data.train_dataloader()) == 4

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Trainer, "trainer", instantiate=False)
    trainer = parser.parse_string(devices).trainer

    assert trainer.strategy.init_args.tensor_parallel_size == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("step", [Packs(8), Sequences(8)])
@pytest.mark.parametrize("path", ["", "lightning_thd."])
def test_a_step_size_of_a_config_is_the_class_it_names(
    step: Packs | Sequences, path: str, tmp_path: Path
) -> None:
    text = f"data: {{global_batch: {{class_path: {path}{type(step).__name__}, init_args: {{n: 8}}}}}}"
    assert parsed(text, tmp_path).global_batch == step


def test_help_and_the_nearest_name_of_what_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--version"])
    main([])
    shown = capsys.readouterr().out
    assert shown.startswith(f"lightning-thd {__version__}\n")
    assert all(f"  {command} " in shown for command in ("fit", *TOOLS))
    for name in TOOLS:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert "--json" in capsys.readouterr().out, name
    with pytest.raises(SystemExit, match="no command 'pln'. Did you mean plan?"):
        main(["pln"])


FIT = {
    "trainer": {"max_steps": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False},
    "model": {"class_path": "lightning_thd.module.CausalLMModule", "init_args": {"config": SIZES}},
    "data": {"train": "texts.jsonl", "capacity": 8},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--trainer.max_stpes 3", "no option --trainer.max_stpes; did you mean --trainer.max_steps?"),
        ("--config typo.yaml", "there is no option --data.capcity; did you mean --data.capacity?"),
        ("--config none.yaml", "File does not exist: '.*none.yaml'"),
        ("--data.capacity much", 'Parser key "data.capacity": Does not validate against any'),
        ("--data.capacity -3", "capacity=-3; wanted 1 or more. Pass the tokens of a pack"),
        ("--trainer.accelerator abacus", "invalid accelerator name: `accelerator='abacus'`. Available"),
        ("--model.config {}", "config=.*: it names no model_type, for example"),
        ("--data.train none.jsonl", "none.jsonl does not exist, and no file matches it. Pass a file, folder"),
        ("--data.train bad.jsonl", "bad.jsonl, line 1: not JSON"),  # torch's DataLoader lies in between
    ],
)
def test_a_mistake_in_the_words_of_a_fit_is_one_line(
    options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["lightning-thd"])
    files = {"fit.yaml": yaml.safe_dump(FIT), "typo.yaml": "data:\n  capcity: 8\n", "bad.jsonl": "{"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--config", "fit.yaml", "--seed_everything", "1", *options.split()])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lightning-thd")]
    assert len(said) == 1
    assert re.match(f"lightning-thd fit: error: .*{message}", said[0]), said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_error_in_code_of_the_user_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump({**FIT, "model": {"class_path": f"{__name__}.Theirs"}}))
    monkeypatch.setattr("sys.argv", ["lightning-thd"])
    with pytest.raises(ValueError, match="mine"):
        main(["fit", "--config", "fit.yaml", "--seed_everything", "1"])


class Theirs(CausalLMModule):
    """Raises like a module with a bug."""

    def __init__(self) -> None:
        raise ValueError("mine")
