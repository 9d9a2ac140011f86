"""Five steps on any layout of ranks give the parameters of one process that saw every sequence alone."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from lightning_thd import Packs, Sequences
from tests.ranks import run_ranks
from tests.strategies.jobs import STEPS, Layout, family_model, train, train_by_hand
from tests.tiny import largest_error

# fp64: other orders of the same sums. fp32: eps=1e-5 keeps AdamW from amplifying rounding.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
WAYS = [
    {"context_parallel_layout": layout, "context_parallel_communication": communication}
    for layout, communication in product(["dual_chunk", "contiguous"], ["all_gather", "ulysses"])
]


def compare(family: str, layout: Layout, step: Packs | Sequences, dtype: torch.dtype = torch.float64) -> None:
    wanted = train_by_hand(family, layout, step, dtype)
    before = dict(family_model(family, dtype).named_parameters())
    assert all(not torch.equal(wanted["params"][name], before[name]) for name in before)
    found = run_ranks(train, layout.world, family, layout, step, dtype)
    for rank in found:
        assert largest_error(rank["params"], wanted["params"]) < TOLERANCE[dtype]
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=TOLERANCE[dtype])
        assert rank["steps"] == STEPS
    if isinstance(step, Sequences):  # Lightning keeps logs in fp32
        assert found[0]["logged"] == pytest.approx(wanted["losses"][-1], rel=1e-6)
        assert len({rank["microbatches"] for rank in found}) == 1
        assert found[0]["microbatches"] > STEPS  # several a step, or nothing was accumulated


@pytest.mark.parametrize(
    ("family", "layout", "step"),
    [
        ("qwen3", Layout(strategy="thd_ddp", dp=2, cp=2), Sequences(12)),
        ("lfm2", Layout(strategy="thd_ddp", cp=2, options=WAYS[2]), Packs(2)),
        ("mistral", Layout(dp=2, cp=2, options=WAYS[0]), Packs(4)),
        ("qwen3_moe", Layout(cp=2, tp=2), Sequences(12)),
        ("lfm2", Layout(dp=2, tp=2), Packs(4)),
    ],
)
def test_parameters_equal_one_process(family: str, layout: Layout, step: Packs | Sequences) -> None:
    compare(family, layout, step)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3_moe", "lfm2"])
@pytest.mark.parametrize("cp", [1, 2])
def test_sequence_parallel(family: str, cp: int) -> None:
    compare(family, Layout(cp=cp, tp=2, options={"sequence_parallel": True}), Sequences(12))


MESHES = [
    Layout(dp=4),
    Layout(cp=4),
    Layout(tp=4),
    Layout(dp=2, cp=2),
    Layout(dp=2, tp=2),
    Layout(cp=2, tp=2),
    Layout(dp=2, cp=2, tp=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("step", [Sequences(24), Packs(8)], ids=["sequences", "packs"])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3_moe", "lfm2"])
@pytest.mark.parametrize("layout", MESHES, ids=lambda at: f"dp{at.dp}cp{at.cp}tp{at.tp}")
def test_every_mesh_and_family(layout: Layout, family: str, step: Packs | Sequences) -> None:
    compare(family, layout, step)


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS, ids=lambda o: "-".join(o.values()))
@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3_moe", "lfm2"])
@pytest.mark.parametrize(
    "layout", [at for at in MESHES if at.cp > 1], ids=lambda at: f"dp{at.dp}cp{at.cp}tp{at.tp}"
)
def test_every_partition_and_communication(layout: Layout, family: str, options: dict[str, str]) -> None:
    at = Layout(dp=layout.dp, cp=layout.cp, tp=layout.tp, options=options)
    if options["context_parallel_communication"] == "ulysses" and (8 // at.tp) % at.cp:
        pytest.skip(f"{8 // at.tp} heads over {at.cp} ranks")
    compare(family, at, Sequences(12))


@pytest.mark.slow
@pytest.mark.parametrize("layout", MESHES, ids=lambda at: f"dp{at.dp}cp{at.cp}tp{at.tp}")
@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3_moe", "lfm2"])
def test_fp32(layout: Layout, family: str) -> None:
    compare(family, layout, Sequences(24), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("family", ["gemma3", "bamba", "qwen3_5"])
def test_families_that_compute_in_fp32_whatever_they_are_given(family: str, cp: int) -> None:
    layout = Layout(strategy="thd_ddp", cp=cp)
    wanted = train_by_hand(family, layout, Sequences(12))
    found = run_ranks(train, cp, family, layout, Sequences(12))
    # Norms, states and gates of these families are cast to fp32 inside, and rounded there.
    assert largest_error(found[0]["params"], wanted["params"]) < 2e-4
