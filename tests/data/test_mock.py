import json
from pathlib import Path

import numpy as np
import pytest

from lightning_thd.data.mock import LognormalLengths, MockDataset, read_lengths_csv
from lightning_thd.packing import PackPlanner, Sequences

LONG = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 1024,
    "max_seq_len": 8192,
    "mean_seq_len": 4096,
    "lognormal_sigma": 1.1,
}


@pytest.mark.parametrize(
    "shape",
    [(1024, 8192, 4096, 1.1), (16, 4096, 600, 1.0), (1, 100, 95, 0.3), (1, 100, 2, 2.5), (5, 6, 5.5, 0.01)],
)
def test_resampling_keeps_the_mean_asked_for(shape: tuple[float, ...]) -> None:
    low, high, mean, sigma = shape
    lengths = LognormalLengths(
        min_seq_len=low, max_seq_len=high, mean_seq_len=mean, lognormal_sigma=sigma
    ).draw(np.arange(200_000))
    assert low <= lengths.min()
    assert lengths.max() <= high
    assert lengths.mean() == pytest.approx(mean, abs=4 * lengths.std() / np.sqrt(200_000))  # standard errors


def test_resampling_is_a_lognormal_cut_at_its_bounds() -> None:
    """Against drawing and throwing away, at the log mean the closed form found: the same histogram."""
    shape = LognormalLengths(min_seq_len=10, max_seq_len=400, mean_seq_len=100, lognormal_sigma=0.8)
    lengths = shape.draw(np.arange(100_000))
    normal = np.random.default_rng(0).normal(size=400_000)
    candidates = (np.exp(mu + 0.8 * normal) for mu in np.linspace(4.0, 5.5, 151))
    kept = [x[(x > 10) & (x < 400)] for x in candidates]
    nearest = min(kept, key=lambda x: abs(x.mean() - 100))
    quantiles = np.linspace(0.02, 0.98, 25)
    assert np.quantile(lengths, quantiles) == pytest.approx(
        np.quantile(nearest, quantiles), rel=0.02, abs=0.6
    )  # whole tokens


def test_clipping_reproduces_the_usual_bias() -> None:
    lengths = LognormalLengths(
        min_seq_len=1024, max_seq_len=8192, mean_seq_len=4096, lognormal_sigma=1.1, bounds="clip"
    ).draw(np.arange(400_000))
    assert lengths.mean() == pytest.approx(3257, rel=0.005)
    assert (lengths == 1024).mean() == pytest.approx(0.24, abs=0.005)
    assert (lengths == 8192).mean() == pytest.approx(0.12, abs=0.005)


def test_takes_the_settings_as_mapping_text_and_file(tmp_path: Path) -> None:
    (tmp_path / "mock.json").write_text(json.dumps(LONG))
    given = [LONG, json.dumps(LONG), tmp_path / "mock.json", str(tmp_path / "mock.json")]
    lengths = [MockDataset(config).lengths.tolist() for config in given]
    assert lengths[0] == lengths[1] == lengths[2] == lengths[3]
    assert len(lengths[0]) == 10_000
    assert LONG["mode"] == "distribution"  # the caller's mapping is left as it was


def test_is_a_map_style_data_set_with_known_lengths() -> None:
    data = MockDataset(LONG, num_sequences=50, vocab_size=100, seed=3)
    assert len(data) == len(data.lengths) == 50
    for i in (0, 7, 49):
        ids = data[i]["input_ids"]
        assert ids.dtype == np.int64
        assert len(ids) == data.lengths[i]
        assert ids.min() >= 0
        assert ids.max() < 100
    assert np.bincount(data[0]["input_ids"], minlength=100).max() < 0.05 * len(data[0]["input_ids"])
    assert np.array_equal(data[-1]["input_ids"], data[49]["input_ids"])
    again = MockDataset(LONG, num_sequences=80, vocab_size=100, seed=3)
    assert np.array_equal(again[7]["input_ids"], data[7]["input_ids"])
    assert not np.array_equal(data[7]["input_ids"][:1_000], data[8]["input_ids"][:1_000])
    planner = PackPlanner(data.lengths, 8192, global_batch=Sequences(50))
    assert planner.step(0, 0, 2).sequences == 50


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("5\n7\n6\n", None),
        ("seq_len\n5\n7\n6\n", None),
        ("\ufeffseq_len\n5\n7\n6\n", None),
        ("\n5\r\n7\n\n6", None),
        ("id,len\n1,5\n2,7\n3,6\n", "len"),
        ("id,len\n1,5\n2,7\n3,6\n", 1),
        ("1, 5\n2, 7\n3, 6\n", 1),
    ],
)
def test_reads_tables_with_and_without_names(tmp_path: Path, text: str, column: str | int | None) -> None:
    (tmp_path / "lengths.csv").write_text(text, newline="")
    assert read_lengths_csv(tmp_path / "lengths.csv", column).tolist() == [5, 7, 6]
    config = {"mode": "file", "path": str(tmp_path / "lengths.csv")} | ({"column": column} if column else {})
    assert MockDataset(config).lengths.tolist() == [5, 7, 6]
    assert MockDataset(config, num_sequences=5).lengths.tolist() == [5, 7, 6, 5, 7]


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("5\nseven\n", None, r"Line 2 of .* has \['seven'\], with no positive integer in column 0"),
        ("5\n0\n", None, "Line 2 of"),
        ("5\n-3\n", None, "Line 2 of"),
        ("5,1\n7\n", 1, r"Line 2 of .* has \['7'\], with no positive integer in column 1"),
        ("", None, "has no lengths. Write one positive integer on each line"),
        ("seq_len\n", None, "has no lengths"),
        ("id,len\n1,5\n", None, r"has 2 columns named \['id', 'len'\], and column=None chooses none"),
        ("id,len\n1,5\n", "size", "column='size' chooses none of them"),
        ("5\n", 3, "has 1 columns named nothing, and column=3"),
    ],
)
def test_says_which_line_is_wrong(tmp_path: Path, text: str, column: str | int | None, message: str) -> None:
    (tmp_path / "lengths.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_lengths_csv(tmp_path / "lengths.csv", column)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, '"mode" is None. Set it to "file" or "distribution"'),
        ({"mode": "file"}, r"miss \['path'\]"),
        ({"mode": "file", "path": "/nowhere.csv"}, "There is no file '/nowhere.csv' with lengths"),
        (LONG | {"type": "normal"}, '"type" is \'normal\'. Only "lognormal" is known'),
        (LONG | {"sigma": 1}, r"have \['sigma'\] that mean nothing here"),
        (LONG | {"bounds": "wrap"}, "bounds='wrap' is unknown"),
        (LONG | {"mean_seq_len": 9000}, r"mean_seq_len=9000 lies outside \(1024, 8192\)"),
        (LONG | {"min_seq_len": 0}, "min_seq_len=0 and max_seq_len=8192"),
        (LONG | {"lognormal_sigma": 0}, "lognormal_sigma=0 must be above 0"),
        ("{not json", "is no valid JSON"),
        ("nowhere.json", "config='nowhere.json' is neither JSON text nor a file"),
    ],
)
def test_says_which_setting_is_wrong(config: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MockDataset(config)
