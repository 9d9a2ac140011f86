"""A rotating tenth of the sweep over all families: none is wrong, none crashes; and what the sweep writes."""

from __future__ import annotations

import datetime

import pytest

pytest.importorskip("transformers")

from benchmarks.families import KINDS, Line, compare, families, sweep, table, tenth
from lightning_thd.models import register_thd

register_thd()
TODAY = datetime.date.today().toordinal()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_tenth_of_all_families_is_exact_or_refused(kind: str) -> None:
    lines = list(sweep(kind, tenth(list(families(kind)), TODAY)))
    assert lines
    assert not [line for line in lines if line.verdict in ("wrong", "crash")]
    assert any(line.verdict == "exact" for line in lines)


@pytest.mark.parametrize(
    ("kind", "family", "verdict", "reason"),
    [
        ("causal", "git", "refused", "attention of its own"),
        ("causal", "deepseek_v4", "refused", "adds keys of its own"),
        ("causal", "minimax_m3_vl_text", "refused", "block_indices"),
        ("causal", "bigbird_pegasus", "refused", "causal and a bidirectional mask"),
        ("causal", "gemma4_unified", "exact", ""),
        ("image_text", "gemma3", "exact", ""),
        ("image_text", "paligemma", "exact", ""),
        ("image_text", "deepseek_vl_hybrid", "exact", ""),
        ("image_text", "llava", "exact", ""),
    ],
)
def test_families_that_were_wrong_or_refused_for_a_false_reason(
    kind: str, family: str, verdict: str, reason: str
) -> None:
    found, detail = compare(kind, family, families(kind)[family])
    assert found == verdict
    assert reason in detail


def test_ten_runs_see_every_family_once() -> None:
    names = [str(i) for i in range(37)]
    assert sorted(name for k in range(10) for name in tenth(names, k)) == sorted(names)


def test_the_table_counts_and_gives_reasons() -> None:
    lines = [
        Line(kind="causal", family="a", model="A", verdict="exact", detail="1e-07"),
        Line(kind="causal", family="b", model="B", verdict="refused", detail="because | of this"),
    ]
    text = table(lines)
    assert "| causal | 1 | 1 | 0 | 0 | 0 | 0 |" in text
    assert "Exact: a." in text
    assert "| b | refused | because / of this |" in text
