import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_thd.data.mock import MockDataset
from lightning_thd.packing import PackPlanner, Sequences

LONG = {"mode": "distribution", "type": "lognormal", "min_seq_len": 1024, "max_seq_len": 8192}
LONG |= {"mean_seq_len": 4096, "lognormal_sigma": 1.1}


def write(folder: Path, text: str) -> Path:
    (folder / "lengths.csv").write_text(text, newline="")
    return folder / "lengths.csv"


def test_lengths_are_those_of_a_clipped_lognormal() -> None:
    lengths = MockDataset(LONG, num_sequences=400_000).lengths
    assert lengths.mean() == pytest.approx(3257, rel=0.005)
    assert (lengths == 1024).mean() == pytest.approx(0.24, abs=0.005)
    assert (lengths == 8192).mean() == pytest.approx(0.12, abs=0.005)
    normal = np.random.default_rng(0).normal(size=400_000)
    drawn = np.clip(np.exp(np.log(4096) - 1.1**2 / 2 + 1.1 * normal), 1024, 8192)
    quantiles = np.linspace(0.02, 0.98, 25)
    assert np.quantile(lengths, quantiles) == pytest.approx(np.quantile(drawn, quantiles), rel=0.02)


def test_takes_the_settings_as_mapping_text_and_file(tmp_path: Path) -> None:
    (tmp_path / "mock.json").write_text(json.dumps(LONG))
    configs = [LONG, json.dumps(LONG), tmp_path / "mock.json", str(tmp_path / "mock.json")]
    lengths = [MockDataset(config).lengths.tolist() for config in configs]
    assert lengths[0] == lengths[1] == lengths[2] == lengths[3]
    assert len(lengths[0]) == 10_000
    assert LONG["mode"] == "distribution"  # the caller's mapping is left as it was


def test_is_a_map_style_data_set_with_known_lengths() -> None:
    data = MockDataset(LONG, num_sequences=50, vocab_size=100, seed=3)
    assert len(data) == len(data.lengths) == 50
    for i in (0, 7, 49):
        ids = data[i]["input_ids"]
        assert (ids.dtype, len(ids)) == (np.int64, data.lengths[i])
        assert 0 <= ids.min() <= ids.max() < 100
    assert np.bincount(data[0]["input_ids"], minlength=100).max() < 0.05 * len(data[0]["input_ids"])
    assert np.array_equal(data[-1]["input_ids"], data[np.int64(49)]["input_ids"])
    again = MockDataset(LONG, num_sequences=80, vocab_size=100, seed=3)
    assert np.array_equal(again[7]["input_ids"], data[7]["input_ids"])
    assert not np.array_equal(data[7]["input_ids"][:1_000], data[8]["input_ids"][:1_000])
    assert PackPlanner(data.lengths, 8192, global_batch=Sequences(50)).step(0, 0, 2).sequences == 50


@pytest.mark.parametrize("text", ["5\n7\n6\n", "\ufeffseq_len\n5\n7\n6\n", "\n5\r\n7\n\n6"])
def test_reads_lengths_with_and_without_a_name(tmp_path: Path, text: str) -> None:
    config = {"mode": "file", "path": str(write(tmp_path, text))}
    assert MockDataset(config).lengths.tolist() == [5, 7, 6]
    assert MockDataset(config, num_sequences=5).lengths.tolist() == [5, 7, 6, 5, 7]


def lengths_of(text: str) -> Any:
    return lambda folder: {"mode": "file", "path": write(folder, text)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lengths_of("5\nseven\n"), "Line 2 of .* is 'seven', not a positive integer"),
        (lengths_of("5\n0\n"), "Line 2 of"),
        (lengths_of("id,len\n1,5\n"), "Line 2 of .* is '1,5'"),
        (lengths_of("seq_len\n"), "has no lengths"),
        ({}, '"mode" is None'),
        ({"mode": "file"}, r"are \[\], wanted \['path'\]"),
        (LONG | {"type": "normal"}, "\"type\" is 'normal'"),
        (LONG | {"sigma": 1}, "'sigma'.*, wanted "),
        (LONG | {"mean_seq_len": 9000}, "mean_seq_len=9000"),
        (LONG | {"min_seq_len": 0}, "min_seq_len=0.*at least 1 and ascend"),
        (LONG | {"lognormal_sigma": 0}, "sigma must be above 0"),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MockDataset(config(tmp_path) if callable(config) else config)
