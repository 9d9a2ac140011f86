"""The console script, in this process: what it runs, prints and refuses."""

from __future__ import annotations

import re
import subprocess
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
from lightning_thd.report import read_metrics, table
from tests.scripts import finished

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "yaml.md"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    shown = capsys.readouterr().out
    for command in ("fit", "validate", "test", "predict", "report", "flops"):
        assert command in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_every_tool_takes_json_and_shows_an_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in TOOLS:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        shown = capsys.readouterr().out
        assert "example:" in shown, name
        assert max(map(len, shown.splitlines())) <= 80, name
        assert name == "completion" or "--json" in shown, name


def test_the_package_runs_as_the_command() -> None:
    assert finished("-m", "lightning_thd", "--version").stdout == f"lightning-thd {__version__}\n"


def test_a_pipe_that_closes_early_is_no_error() -> None:
    closed = "import os\nread, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)\n"
    done = finished("-c", closed + "from lightning_thd.cli import main\nmain(['peaks'])")
    assert done.stderr == ""


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = tmp_path / "completion.sh"
    script.write_text(
        capsys.readouterr().out
        + "\nCOMP_WORDS=(lightning-thd pl); COMP_CWORD=1; _shtab_lightning_thd; echo ${COMPREPLY[@]}\n"
    )
    found = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert found.stdout.split() == ["plan"], found


# LightningCLI 2.6.6 calls what jsonargparse 4.53 deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quickstart_yaml_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "examples" / "quickstart.yaml").read_text()
    config = tmp_path / "q.yaml"
    changes = {
        "runs/": f"{tmp_path}/",
        "max_steps: 100": "max_steps: 2",
        "capacity: 8192": "capacity: 2500",
        "hidden_size: 256": "hidden_size: 32",
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    monkeypatch.setattr("sys.argv", ["lightning-thd", "fit", "--config", str(config)])
    main()
    series = read_metrics(tmp_path / "quickstart-yaml")
    assert [step for step, _ in series["train/loss"]] == [0, 1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*will be overridden by `LightningCLI")
def test_an_optimizer_that_would_train_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = str(ROOT / "examples" / "quickstart.yaml")
    folder = f"--trainer.default_root_dir={tmp_path}"
    monkeypatch.setattr("sys.argv", ["", "fit", "--config", config, folder, "--optimizer", "AdamW"])
    with pytest.raises(SystemExit, match=r"--optimizer is made before configure_model\(\).*--model.lr"):
        main()


def parsed(text: str, folder: Path) -> THDDataModule:
    """Build the data module of a YAML config, as LightningCLI does."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(THDDataModule, "data")
    file = folder / "data.yaml"
    file.write_text(text)
    made = parser.instantiate_classes(parser.parse_args(["--config", str(file), "--data.capacity=64"]))
    found: THDDataModule = made.data
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_printed_config_says_the_same_data_again() -> None:
    whole, mixture, stream, _ = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.S)
    several = "data: {train: [my.jsonl, code.jsonl], val: my.jsonl, capacity: 64}"
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(THDDataModule, "data")
    for text in (whole, mixture, stream, several):
        given = parser.parse_object({"data": yaml.safe_load(text)["data"]})
        assert parser.parse_string(parser.dump(given)) == given


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
    found = parser.parse_string(devices).trainer
    assert found.strategy.init_args.tensor_parallel_size == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("step", [Packs(8), Sequences(8)])
@pytest.mark.parametrize("path", ["", "lightning_thd."])
def test_a_step_size_of_a_config_is_the_class_it_names(
    step: Packs | Sequences, path: str, tmp_path: Path
) -> None:
    text = f"data: {{global_batch: {{class_path: {path}{type(step).__name__}, init_args: {{n: 8}}}}}}"
    assert parsed(text, tmp_path).global_batch == step


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mixtures_streams_and_several_sets_of_a_config(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "abc"}\n' * 4)
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    data = parsed(f"data: {{train: {{a: [{a}, 0.5], b: [{b}, 0.5]}}, val: {{x: {a}, y: {b}}}}}", tmp_path)
    data.setup("fit")
    assert sum(len(batch.sequence_ids) for batch in data.train_dataloader()) == 8
    assert len(data.val_dataloader()) == 2
    stream = "class_path: lightning_thd.data.streams.Stream"
    data = parsed(f"data: {{train: {{{stream}, init_args: {{source: {a}}}}}}}", tmp_path)
    data.setup("fit")
    assert sum(len(batch.sequence_ids) for batch in data.train_dataloader()) == 4


def test_report_prints_a_table_and_draws_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.csv").write_text(
        "step,epoch,train/loss,train/device/mfu\n0,0,5.5,\n4,0,3.25,0.5\n9,0,2.0,0.25\n"
    )
    main(["report", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["loss", "5.5", "3.25", "2"] for line in lines)
    assert any(line.split() == ["MFU", "50%", "50%", "25%"] for line in lines)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_later_run_continues_the_series(tmp_path: Path) -> None:
    for version, rows in enumerate(("0,1.0\n1,0.9\n2,0.8", "2,0.7\n3,0.6")):
        folder = tmp_path / f"version_{version}"
        folder.mkdir()
        (folder / "metrics.csv").write_text(f"step,train/loss\n{rows}\n")
    assert read_metrics(tmp_path)["train/loss"] == [(0, 1.0), (1, 0.9), (2, 0.7), (3, 0.6)]
    assert "loss" in str(table(read_metrics(tmp_path)))
    with pytest.raises(ValueError, match=r"nothing is no folder. Pass the one that CSVLogger was given"):
        read_metrics(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"No metrics.csv below .*CSVLogger"):
        read_metrics(tmp_path / "empty")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "x", "--capcity", "8"], "there is no option --capcity; did you mean --capacity?"),
        (["plan", "x"], "the following arguments are required: --capacity"),
        (["plan", "nowhere/here", "--capacity", "8"], "nowhere/here does not exist"),
        (["peaks", "H1000"], "no peak is known for 'H1000'; did you mean h100?"),
        (["peaks", "NVIDIA H1000"], "no peak is known for 'NVIDIA H1000'; did you mean h100?"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in (said := capsys.readouterr().err)
    assert said.count("\n") == 1


def test_a_mistyped_command_or_training_option_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no command 'pln'. Did you mean plan?"):
        main(["pln"])
    monkeypatch.setattr("sys.argv", ["lightning-thd"])
    with pytest.raises(SystemExit, match="no option --trainer.max_stpes; did you mean --trainer.max_steps?"):
        main(["fit", "--trainer.max_stpes", "3", "--data.capacity", "8"])


def test_a_shell_completes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "fish"])
    script = capsys.readouterr().out
    for word in ("graph-plan", "capacity", "validate", "theme"):
        assert word in script


def test_a_misspelt_option_in_yaml_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "typo.yaml"
    config.write_text("data:\n  capcity: 8\n")
    monkeypatch.setattr("sys.argv", ["lightning-thd"])
    with pytest.raises(
        SystemExit, match=r"there is no option --data\.capcity; did you mean --data\.capacity\?"
    ):
        main(["fit", "--config", str(config)])
