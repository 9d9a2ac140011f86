"""Every measured figure of the README and the pages is that of its table, and no shortcoming is left out."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import end_to_end, figures
from benchmarks.quickstart import table_of
from benchmarks.results import Result

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_regions_of_all_pages_are_those_of_the_tables() -> None:
    stale = [page.name for page in figures.PAGES if figures.fill(page.read_text()) != page.read_text()]
    assert stale == [], "run python -m benchmarks.figures"
    assert README.count("<!-- figures: ") >= 4


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_other_figure_has_a_source(page: Path) -> None:
    name = page.relative_to(ROOT).as_posix()
    cited = figures.CITED.get(name, {})
    shown = set(figures.FIGURE.findall(figures.sentences(page.read_text())))
    assert shown - set(cited) == set(), "add its row, or why it has none, to CITED in benchmarks/figures.py"
    assert set(cited) - shown == set(), "CITED has figures that the page does not have"
    for figure, source in cited.items():
        if not isinstance(source, str):
            assert figures.agrees(figure, source()), (name, figure, source())


def test_a_figure_that_is_not_its_row_is_found() -> None:
    assert figures.agrees("3.1x", 3.05)
    assert figures.agrees("12 ms", 11.52)
    assert not figures.agrees("14 ms", 11.52)
    assert not figures.agrees("1.17 times", 1.18)
    assert figures.agrees("11 of 17", "11 of 17")
    assert not figures.agrees("14 of 17", "")  # GPU.md does not say so
    assert figures.FIGURE.findall(
        figures.sentences("44\nfamilies, 39 kB, 11 of 17 layouts, UTF-8 bytes")
    ) == [
        "44 families",
        "39 kB",
        "11 of 17",
    ]
    assert figures.FIGURE.findall("4.5x, 70 % and 1,000 tokens/s, not v1.2.3 or 8k") == [
        "4.5x",
        "70 %",
        "1,000 tokens/s",
    ]


def test_every_row_worse_than_its_peer_is_on_the_first_page() -> None:
    rows = figures.shortcomings()
    assert len(rows) >= 10
    # read in another way than by figures.short(): straight from the lines of RESULTS.md
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.endswith("| NO |")]
    ratios = {(line[0], line[1]): float(line[5].removesuffix("x")) for line in cells if line[5].strip()}
    missed = {key: ratio for key, ratio in ratios.items() if ratio < 0.9}
    assert missed
    assert {what for _, what in missed} <= {row.what for _, row, _ in rows}

    listed = README.split("Where it falls short")[1]
    told = [float(number) for number in re.findall(r"(0\.\d\d)x", listed)]
    for benchmark in {name for name, _ in missed}:
        worst = min(ratio for (name, _), ratio in missed.items() if name == benchmark)
        assert min(abs(worst - number) for number in told) <= 0.0051, (benchmark, worst)


def test_a_new_shortcoming_without_a_line_stops_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    row = figures.row("packing", "plan 1,000,000, long@8k, TRL")
    worse = replace(row, what="a new thing", ratio=0.5, met=False)
    before = figures.results()
    changed: dict[str, list[Result]] = before | {"packing": [*before["packing"], worse]}
    monkeypatch.setattr(figures, "results", lambda: changed)
    with pytest.raises(ValueError, match="packing: a new thing is 0.50 of its peer"):
        figures.short()


def test_the_fair_peer_is_beside_the_others() -> None:
    rates = figures.one_b("H200")
    assert set(rates) == {"padded", "flattened", "packs", "graphs"}
    first = README.split("```python")[0]
    assert figures.times(rates["packs"] / rates["padded"]) in first
    assert figures.times(rates["packs"] / rates["flattened"]) in first
    assert figures.times(rates["graphs"] / rates["flattened"]) in first
    # the first number that a reader meets is a GPU's
    number = re.search(r"\d[\d,]+ tokens/s", first)
    assert number is not None
    assert number[0] == f"{rates['packs']:,.0f} tokens/s"


def test_the_quickstarts_table_ends_at_the_line_of_the_measured_peak() -> None:
    table = "           first  median  last\nloss       5.672  3.1     2.244\n"
    peak = "MFU is the share of 0.2061 TFLOP/s, the peak of a device."
    dip = "Fill fell to 41.2% at step 93: the last packs of an epoch hold what is left."
    printed = f"3.3M parameters, cpu, bf16-mixed, 100 steps\n\n{table}{peak}\n{dip}\n\nPicture: report.png\n"
    assert table_of(printed) == table + peak
    with pytest.raises(ValueError, match="no table with a measured peak"):
        table_of(printed.replace(peak, ""))


def test_rows_of_like_length_have_the_least_padding() -> None:
    lengths = random.Random(0).choices(range(1, 2_000), k=1_000)
    batches = end_to_end.batches_of_like_length(lengths)
    assert sorted(i for batch in batches for i in batch) == list(range(1_000))
    documents = [torch.zeros(length) for length in lengths]
    dealt = [[documents[i] for i in batch] for batch in batches]
    shares = [end_to_end.fill(rows) for rows in (dealt, end_to_end.rows_by_length(documents))]
    assert end_to_end.fill(end_to_end.padded_rows(documents)) < shares[0] <= shares[1]


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 1_200
