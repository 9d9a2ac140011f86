"""A turn of the sweep over all families every day: none is wrong, none crashes; and what the sweep writes."""

from __future__ import annotations

import datetime

import pytest

pytest.importorskip("transformers")

import transformers
from packaging.version import Version

from benchmarks.families import KINDS, compare, families, sweep, turn
from benchmarks.family_sizes import Sizes, draw
from benchmarks.family_table import Line, read_table, table, updated
from lightning_thd.models import register_thd

register_thd()
TODAY = datetime.date.today().toordinal()
TURNS = 90
EARLY = Version(transformers.__version__) < Version("5.23")
FAMILIES_WARN = pytest.mark.filterwarnings("ignore")  # of what is theirs


@pytest.mark.slow
def test_the_sweep_runs_families_in_a_process_of_their_own() -> None:
    lines = list(sweep("causal", ["llama", "bloom"], group=1))
    assert [(line.family, line.verdict) for line in lines] == [("llama", "exact"), ("bloom", "refused")]


@FAMILIES_WARN
def test_the_families_whose_turn_is_today_are_exact_or_refused() -> None:
    pairs = [f"{kind} {name}" for kind in KINDS for name in families(kind)]
    found = {}
    for kind, name in map(str.split, turn(pairs, TODAY, of=TURNS)):
        found[kind, name] = compare(kind, name, families(kind)[name])
    bad = {pair: verdict for pair, verdict in found.items() if verdict[0] in ("wrong", "crash")}
    kinds, names = (",".join(sorted({pair[i] for pair in bad})) for i in (0, 1))
    again = f"python -m benchmarks.families --kinds {kinds} --only {names}"
    assert not bad, f"turn {TODAY % TURNS} of {TURNS}, whatever the day: {again}\n{bad}"
    assert "exact" in [verdict for verdict, _ in found.values()]


@FAMILIES_WARN
@pytest.mark.parametrize(
    ("kind", "family", "verdict", "reason"),
    [
        ("causal", "deepseek_v4", "refused", "adds keys of its own"),
        ("causal", "minimax_m3_vl_text", "refused", "block_indices"),
        ("causal", "bart", "refused", "counts positions along the whole row"),
        ("causal", "gemma4_unified", "exact", ""),
        ("image_text", "gemma3", "exact", ""),
        pytest.param("image_text", "deepseek_vl_hybrid", "exact", "", marks=pytest.mark.slow),
        pytest.param("image_text", "got_ocr2", "exact", "", marks=pytest.mark.slow),
        ("encoder", "mobilebert", "refused", "trigram_input"),
        ("causal", "deepseek_v32", "refused", "chooses the keys of every token by an index"),
        pytest.param("causal", "zaya", "exact", "", marks=pytest.mark.slow),
        ("causal", "doge", "refused", "needs the causal mask itself"),
        ("encoder", "layoutlm", "exact", ""),
        ("token", "umt5", "refused", "position_bias"),
        ("causal", "rwkv", "exact", ""),
        ("causal", "falcon", "refused", "FALCON_ATTENTION_CLASSES, which has no 'thd'"),
        ("sequence", "albert", "exact", ""),
    ],
)
def test_families_that_were_wrong_or_refused_for_a_false_reason(
    kind: str, family: str, verdict: str, reason: str
) -> None:
    if family not in families(kind):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    found, detail = compare(kind, family, families(kind)[family])
    assert found == verdict
    if reason in ("needs the causal mask itself", "chooses the keys of every token by an index") and EARLY:
        return  # refused too, by what those releases hand to the attention
    assert reason in detail


def test_the_table_counts_and_gives_reasons() -> None:
    lines = [
        Line(kind="causal", family="a", model="A", verdict="exact", detail="1e-07"),
        Line(kind="causal", family="b", model="B", verdict="refused", detail="because | of this"),
    ]
    text = table(lines)
    assert "| causal | 1 | 1 | 0 | 0 | 0 | 0 |" in text
    assert "Exact: a." in text
    assert "| b | refused | because / of this |" in text
    new = [Line(kind="causal", family="b", model="B", verdict="exact")]
    again = read_table(text)
    assert table(again) == text
    assert "| causal | 2 | 0 | 0 | 0 | 0 | 0 |" in table(updated(again, new))
    assert "Exact: a, b." in table(updated(again, new))


@FAMILIES_WARN
def test_other_sizes_of_the_models_whose_turn_it_is_are_exact_or_refused() -> None:
    """Layers, heads, windows, ropes and documents are drawn anew every day."""
    names = turn(list(families("causal")), TODAY, of=160)
    drawn = {name: draw(TODAY, name) for name in names}
    found = {name: compare("causal", name, families("causal")[name], drawn[name]) for name in names}
    bad = {name: verdict for name, verdict in found.items() if verdict[0] in ("wrong", "crash")}
    again = f"python -m benchmarks.families --kinds causal --vary {TODAY} --only {','.join(bad)}"
    assert not bad, f"{again}\n{bad}"


@FAMILIES_WARN
def test_a_rope_of_keys_that_belong_to_no_sequence_is_refused() -> None:
    sizes = Sizes(
        overrides={
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "max_position_embeddings": 16,
        },
        lengths=(17, 3),
        pad=0,
    )
    verdict, reason = compare("causal", "deepseek_v4", "DeepseekV4ForCausalLM", sizes)
    assert verdict == "refused", reason
