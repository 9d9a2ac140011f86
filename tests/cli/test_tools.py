"""``lightning-thd plan``, ``check``, ``peaks``, ``report``: their figures, and what they refuse."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from lightning_thd.cli import main
from lightning_thd.cli.arguments import in_options
from lightning_thd.flops.peaks import PEAKS
from lightning_thd.report import read_metrics
from tests.flops.families import small_config

SIZES = {
    "model_type": "llama", "vocab_size": 260, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
PLAN = "plan {here}/texts.jsonl --capacity 64"
Said = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 90 texts and a config."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = [json.dumps({"text": "x" * (7 + 13 * (i % 9))}) + "\n" for i in range(90)]
    (tmp_path / "texts.jsonl").write_text("".join(texts))
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return tmp_path


def test_a_plan_says_what_its_steps_hold(here: Path, capsys: Said) -> None:
    plan = ["plan", f"{here}/texts.jsonl", "--capacity", "256"]
    picture = here / "packs.png"
    main([*plan, "--dp", "2", "--json", "--plot", str(picture)])
    printed = json.loads(capsys.readouterr().out)
    tokens = sum(8 + 13 * (i % 9) for i in range(90))  # one byte a letter, and EOS

    assert (printed["sequences"], printed["tokens"]) == (90, tokens)
    assert printed["lengths"] == [8, 8 + 13 * 4, 8 + 13 * 8]  # shortest, median, longest
    assert printed["packs"] == 2 * printed["steps"]
    assert printed["fill"] == pytest.approx(tokens / (printed["packs"] * 256))

    texts = [8 + 13 * (i % 9) for i in range(90)]
    orders = random.Random(0)
    slots = [  # of batches of 8 in random order, with 2 sequences in the last
        sum(len(row) * max(row) for row in (order[i : i + 8] for i in range(0, 90, 8)))
        for order in (orders.sample(texts, 90) for _ in range(200))
    ]

    assert printed["padded_fill"] == pytest.approx(tokens * 200 / sum(slots), abs=0.03)
    assert printed["imbalance"] >= 1
    assert printed["tokens_per_s"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")

    main([*plan, "--model", f"{here}/config.json", "--device", "NVIDIA H200", "--mfu", "0.5"])
    shown = capsys.readouterr().out
    assert re.search(r"^tokens/s of one device +[\d,]+$", shown, re.M)
    assert max(map(len, shown.splitlines())) <= 80

    main([*plan[:3], "100", "--oversize", "drop"])
    shown = r" 8 / 53 / 99\n.*sequences: dropped +10\ntokens lost +1,120$"  # half of 80 have 47 or fewer
    assert re.search(shown, capsys.readouterr().out, re.M | re.S)

    main([*plan[:3], "7", "--oversize", "own_pack", "--json"])
    assert json.loads(capsys.readouterr().out)["fill"] == 1.0  # every sequence is its own pack


def test_a_capacity_that_splits_most_documents_is_warned_of(here: Path, capsys: Said) -> None:
    main(["plan", f"{here}/texts.jsonl", "--capacity", "32", "--json"])
    assert "--capacity 32 splits 70 of 90 documents" in capsys.readouterr().err
    main(["plan", f"{here}/texts.jsonl", "--capacity", "256"])
    assert not capsys.readouterr().err


def test_shared_prefixes_are_planned_as_distinct_tokens(here: Path, capsys: Said) -> None:
    texts = [f"{prompt:c}" * 40 + f"{answer}" * 8 for prompt in range(97, 117) for answer in range(5)]
    (here / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    model = ["--model", f"{here}/config.json", "--device", "H100 SXM"]
    plans = []

    for share in ([], ["--share-prefixes"]):
        plan = ["plan", f"{here}/texts.jsonl", "--capacity", "256", *model, *share]
        main([*plan, "--json", "--plot", f"{here}/packs.png"])
        plans.append(json.loads(capsys.readouterr().out))

    tokens = 100 * 49  # an EOS ends each answer
    distinct = 20 * 40 + 100 * 9
    assert [one["tokens"] for one in plans] == [tokens] * 2
    assert [one["distinct"] for one in plans] == [tokens, distinct]
    assert plans[1]["fill"] == pytest.approx(distinct / (256 * plans[1]["packs"]))
    assert plans[1]["packs"] < plans[0]["packs"] / 2
    # Attention adds little to the linear work of these.
    assert plans[1]["tokens_per_s"] == pytest.approx(plans[0]["tokens_per_s"] * tokens / distinct, rel=0.05)


def test_a_model_that_keeps_sequences_apart(here: Path, capsys: Said) -> None:
    (here / "config.json").rename(here / "my_config.json")  # a neighbour named config.json is not read
    (here / "config.json").write_text("{}")
    small_config("gemma4_text").save_pretrained(here / "gemma")  # its last layers use keys of others
    for model, layers in (("my_config.json", "1"), ("gemma", "2")):
        main(["check", f"{here}/{model}", "--layers", layers, "--json"])
        assert json.loads(capsys.readouterr().out)["ok"] is True


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    hub = pytest.importorskip("huggingface_hub")
    requests: list[str] = []

    def model_info(self: object, name: str, **how: object) -> None:
        requests.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr(hub.HfApi, "model_info", model_info)
    with pytest.raises(SystemExit):
        main(["check", "nobody/model"])
    assert requests == ["nobody/model"]
    assert "nobody/model is neither a folder nor a cached model, and the hub" in capsys.readouterr().err


def test_peaks_have_a_line_a_device_with_its_source(capsys: Said) -> None:
    main(["peaks"])
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if re.search(r" \[\d+\]$", line)]) == len(PEAKS)
    (h100,) = [line for line in lines if line.startswith("h100 pcie ")]
    *figures, number = h100.split()[2:]
    assert figures == ["756", "756", "378", "51.2", "1513", "-", "sparse"]
    assert f"{number} NVIDIA H100 Tensor Core GPU datasheet" in lines
    main(["peaks", "NVIDIA H100 80GB HBM3", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["bf16"]) == ("h100", 989.4)


def test_a_report_is_of_all_runs_and_later_ones_continue_the_series(tmp_path: Path, capsys: Said) -> None:
    for version, rows in enumerate(("0,5.5,\n4,3.25,0.5\n9,3,", "9,2.0,0.25")):
        folder = tmp_path / f"version_{version}"
        folder.mkdir()
        (folder / "metrics.csv").write_text(f"step,train/loss,train/device/mfu\n{rows}\n")
    assert read_metrics(tmp_path)["train/loss"] == [(0, 5.5), (4, 3.25), (9, 2.0)]
    main(["report", str(tmp_path)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["loss", "5.5", "3.25", "2"] in lines
    assert ["MFU", "50%", "37.5%", "25%"] in lines
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{PLAN} --sequences 0", "--sequences: 0; wanted at least 1"),
        (f"{PLAN} --dp two", "--dp: invalid whole_number value: 'two'"),
        (f"{PLAN} --mfu 0.3", "--mfu 0.3 is for the speed of a device. Pass --device too"),
        (f"{PLAN} --mfu nan", "--mfu: nan; wanted a share, above 0 and at most 1"),
        (f"{PLAN} --theme dark", "--theme dark sets the drawing's colours. Pass --plot"),
        (f"{PLAN} --plot {{here}}/none/a.png", "a.png': no file can be written there; is its folder there"),
        (f"{PLAN} --plot a.bmp2", "'a.bmp2' is not a picture; wanted one of .png"),
        (f"{PLAN} --tokenizer /none", r"/none does not exist. Pass a folder that save_pretrained\(\) wrote"),
        (f"{PLAN} --model ./none", "./none does not exist. Pass a config.json, a folder"),
        (f"{PLAN} --model {{here}}/none.json", "none.json does not exist. Pass a config.json"),
        (
            f"{PLAN} --model {{here}}/texts.jsonl",
            "texts.jsonl is not JSON .Extra data: line 2.*Pass a config.json",
        ),
        (f"{PLAN} --model {{here}}/empty.json", "No FLOP count is known for model_type"),
        (f"{PLAN} --device H100", "--device H100 is for a speed, .* Pass --model too"),
        (f"{PLAN} --device Abacus --model {{here}}/config.json", "No peak FLOP/s is known for 'Abacus'"),
        (f"{PLAN} --oversize shorten", "own_pack"),
        ("plan x --capcity 8", "there is no option --capcity; did you mean --capacity?"),
        ("plan x", "the following arguments are required: --capacity"),
        ("check {here}/config.json --layers 3", "--layers 3, but .*json has 2 layers. Pass at most as many"),
        ("peaks H1000", "no peak is known for 'H1000'; did you mean h100?"),
        ("report {here}/torn", "metrics.csv is not a table of CSVLogger .* Repair or remove it"),
        ("report {here}/none", "No metrics.csv below .*CSVLogger"),
        ("graph-plan {here}/texts.jsonl --max-sequences 0", "--max-sequences: 0; wanted at least 1"),
    ],
)
def test_arguments_that_cannot_be_meant(line: str, message: str, here: Path, capsys: Said) -> None:
    (here / "empty.json").write_text("{}")
    (here / "torn").mkdir()
    (here / "torn" / "metrics.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="2"):
        main(line.format(here=here).split())
    said = capsys.readouterr().err
    assert re.search(message, " ".join(said.split())), said
    assert said.count("\n") == 1


def test_messages_name_options_instead_of_arguments(here: Path, capsys: Said) -> None:
    long = here / "long.jsonl"
    long.write_text(json.dumps({"text": "x" * 50}) + "\n")
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(long), "--capacity", "16", "--oversize", "error"])
    said = " ".join(capsys.readouterr().err.split())
    assert "--oversize" in said
    assert "oversize=" not in said
    both = "Set oversize='truncate' or text_key=, or raise capacity=8."
    assert in_options(both) == "Set --oversize truncate or --text-key, or raise --capacity 8."


def test_the_speed_of_a_plan_names_its_assumed_mfu(here: Path, capsys: Said) -> None:
    device = ["--device", "H100", "--model", str(here / "config.json")]
    main(["plan", str(here / "texts.jsonl"), "--capacity", "1024", *device])
    assert re.search(r"^its MFU, assumed \(--mfu\) +40%$", capsys.readouterr().out, re.M)
    main(["plan", str(here / "texts.jsonl"), "--capacity", "1024", *device, "--mfu", "0.25", "--json"])
    assert json.loads(capsys.readouterr().out)["mfu"] == 0.25
