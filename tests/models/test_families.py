"""A turn of the sweep over all families every day: none is wrong, none crashes."""

from __future__ import annotations

import datetime

import pytest

pytest.importorskip("transformers")

import transformers
from packaging.version import Version

from benchmarks.families import KINDS, compare, families
from benchmarks.family_sizes import Sizes, draw
from lightning_thd.models import register_thd

register_thd()
TODAY = datetime.date.today().toordinal()
EARLY = Version(transformers.__version__) < Version("5.23")
FAMILIES_WARN = pytest.mark.filterwarnings("ignore")  # of what is theirs


@FAMILIES_WARN
@pytest.mark.parametrize(
    ("kind", "family", "verdict", "reason"),
    [
        ("causal", "deepseek_v4", "refused", "adds keys of its own"),
        ("causal", "minimax_m3_vl_text", "refused", "passes block_indices to its attention"),
        ("causal", "bart", "refused", "counts positions along the whole row"),
        ("causal", "gemma4_unified", "exact", ""),
        ("image_text", "gemma3", "exact", ""),
        pytest.param("image_text", "deepseek_vl_hybrid", "exact", "", marks=pytest.mark.slow),
        pytest.param("image_text", "got_ocr2", "exact", "", marks=pytest.mark.slow),
        ("encoder", "mobilebert", "refused", "trigram_input"),
        ("causal", "deepseek_v32", "refused", "chooses the keys of every token by an index"),
        pytest.param("causal", "zaya", "exact", "", marks=pytest.mark.slow),
        ("causal", "doge", "refused", "hides keys by a window or chunk of 8"),
        ("encoder", "layoutlm", "exact", ""),
        ("token", "umt5", "refused", "position_bias"),
        ("causal", "rwkv", "exact", ""),
        ("causal", "falcon", "refused", "has its own attention that ignores"),
        ("sequence", "albert", "exact", ""),
    ],
)
def test_families_that_were_wrong_or_refused_for_a_false_reason(
    kind: str, family: str, verdict: str, reason: str
) -> None:
    if family not in families(kind):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    outcome, detail = compare(kind, family, families(kind)[family])
    assert outcome == verdict
    if reason in ("adds to its mask", "chooses the keys of every token by an index") and EARLY:
        return  # refused too, by what those releases hand to the attention
    assert reason in detail


@FAMILIES_WARN
@pytest.mark.parametrize("vary", [False, True])  # layers, heads, windows, ropes, documents drawn every day
def test_the_families_whose_turn_is_today_are_exact_or_refused(vary: bool) -> None:
    pairs = [(kind, name) for kind in KINDS for name in families(kind) if kind == "causal" or not vary]
    of = 160 if vary else 90
    verdicts = {
        (kind, name): compare(kind, name, families(kind)[name], draw(TODAY, name) if vary else None)
        for i, (kind, name) in enumerate(pairs)
        if i % of == TODAY % of
    }
    bad = {pair: verdict for pair, verdict in verdicts.items() if verdict[0] in ("wrong", "crash")}
    kinds, names = (",".join(sorted({pair[i] for pair in bad})) for i in (0, 1))
    again = f"python -m benchmarks.families --kinds {kinds} --only {names}" + f" --vary {TODAY}" * vary
    assert not bad, f"turn {TODAY % of} of {of}, whatever the day: {again}\n{bad}"
    assert vary or "exact" in [verdict for verdict, _ in verdicts.values()]


@FAMILIES_WARN
def test_a_rope_of_keys_that_belong_to_no_sequence_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    overrides = {"rope_parameters": rope, "max_position_embeddings": 16}
    sizes = Sizes(overrides=overrides, lengths=(17, 3), pad=0)
    verdict, reason = compare("causal", "deepseek_v4", "DeepseekV4ForCausalLM", sizes)
    assert verdict == "refused", reason
