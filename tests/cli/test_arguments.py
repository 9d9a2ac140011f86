"""Arguments of every tool that cannot be meant: one line that says what was wanted, and exit code 2."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_thd import __version__
from lightning_thd.cli import main

SIZES = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PLAN, FLOPS, GRAPHS = "plan {texts} --capacity 64", "flops {config} --lengths", "graph-plan {texts}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{PLAN} --sequences 0", "--sequences: 0; wanted at least 1"),
        (f"{PLAN} --steps 0", "--steps: 0; wanted at least 1"),
        (f"{PLAN} --dp two", "--dp: 'two' is no whole number"),
        (f"{PLAN} --mfu 0.3", "--mfu 0.3 asks for a speed, which is a device's. Pass --device too"),
        (f"{PLAN} --mfu nan", "--mfu: nan; wanted a number above 0"),
        (f"{PLAN} --mfu 1.5", "--mfu: 1.5; wanted a share, above 0 and at most 1"),
        (f"{PLAN} --mfu half", "--mfu: 'half' is no number"),
        (f"{PLAN} --theme dark", "--theme dark is of the drawing. Pass --plot too"),
        (f"{PLAN} --plot {{folder}}/none/a.png", "a.png': no file can be written there; is its folder there"),
        (f"{PLAN} --plot a.bmp2", "'a.bmp2' is no picture; wanted one of .png"),
        (f"{PLAN} --tokenizer /none", r"/none does not exist. Pass a folder that save_pretrained\(\) wrote"),
        (f"{PLAN} --model ./none", "./none does not exist. Pass a config.json, a folder"),
        (f"{FLOPS} -1", "--lengths: -1; wanted at least 0"),
        (f"{FLOPS} {10**20}", f"lengths holds {10**20}, past int64"),
        (f"{FLOPS} 5 --dtype bf16", "--dtype bf16 is of the peak of --device. Pass --device too"),
        ("flops none.json --lengths 5", "none.json does not exist. Pass a config.json"),
        ("check {config} --layers 3", "--layers 3, but .*config.json has 2. Pass at most as many"),
        ("check {config} --layers 0", "--layers: 0; wanted at least 1"),
        ("check {wrong}", "wrong/config.json cannot be built: RuntimeError: .*negative dimension.*Look at"),
        ("peaks Abacus", "no peak is known for 'Abacus'"),
        (f"{GRAPHS} --max-sequences 0", "--max-sequences: 0; wanted at least 1"),
    ],
)
def test_arguments_that_cannot_be_meant(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "abc"}\n' * 9)
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "config.json").write_text(json.dumps({**SIZES, "hidden_size": -32}))
    places = {
        "texts": tmp_path / "texts.jsonl",
        "config": tmp_path / "config.json",
        "wrong": tmp_path / "wrong" / "config.json",
        "folder": tmp_path,
    }
    with pytest.raises(SystemExit, match="2"):
        main(line.format(**places).split())
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"lightning-thd {__version__}\n"
