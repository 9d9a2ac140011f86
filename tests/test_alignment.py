from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_thd.alignment import Alignment, Layout, Recipe

RECIPES: tuple[Recipe, ...] = get_args(Recipe)


def kernel_asserts(recipe: Recipe | None, local: int, gathered: int) -> list[str]:
    """Every assertion written out by hand as Transformer Engine and torch write it, not from our table.

    One linear layer of 256 to 512 features; x has ``local`` rows before sequence parallel gathers them.
    """
    n_in = 256
    n_out = 512
    failed = []

    def check(ok: bool, what: str) -> None:
        if not ok:
            failed.append(what)

    if recipe is None:
        return failed
    # assert_dim_for_fp8_exec(x): rows % 8, features % 16
    check(local % 8 == 0 and n_in % 16 == 0, "assert_dim_for_fp8_exec")
    # y[gathered, n_out] = x @ w.T and dx = dy @ w: column-major m, n, k as cuBLASLt sees them
    products = [
        ("forward", n_out, gathered, n_in),
        ("dgrad", n_in, gathered, n_out),
        ("wgrad", n_in, n_out, gathered),
    ]
    for name, m, n, k in products:
        if recipe == "tensorwise":
            check(k % 16 == 0, f"{name} lda, ldb % 16 (Hopper: TN only)")
            check(name == "wgrad" or (m % 16 == 0 and n >= 0), f"{name} ldb on Blackwell")
            # torch._scaled_mm(self[n, k], mat2[k, m]): k and m of 16; n is free
            check(k % 16 == 0 and m % 16 == 0, f"{name} _scaled_mm")
        if recipe == "blockwise":
            check(k % 16 == 0, f"{name} lda, ldb % 16")
            check(m % 8 == 0 and n % 8 == 0, f"{name} m, n % 8")
    if recipe == "blockwise":
        check(local % 128 == 0 and n_in % 128 == 0, "Float8BlockQuantizer.is_quantizable")
    if recipe == "mxfp8":
        check(local % 32 == 0 and gathered % 32 == 0 and n_in % 32 == 0, "MXFP8Quantizer.make_empty")
    if recipe == "nvfp4":
        check(local % 16 == 0 and gathered % 16 == 0 and n_in % 16 == 0, "NVFP4Quantizer.make_empty")
        check(gathered % 32 == 0, "16-byte rows of 4-bit numbers in cuBLASLt")
        check(local % 128 == 0, "fused Hadamard cast")
    return failed


@pytest.mark.parametrize(
    ("options", "sequence", "total"),
    [
        ({}, 1, 1),
        ({"recipe": "tensorwise"}, 1, 16),
        ({"recipe": "blockwise"}, 1, 128),
        ({"recipe": "mxfp8"}, 1, 32),
        ({"recipe": "nvfp4"}, 1, 128),
        ({"cp": 2}, 4, 4),
        ({"cp": 3}, 6, 6),
        ({"cp": 2, "layout": "contiguous"}, 1, 2),
        ({"tp": 4}, 1, 1),
        ({"tp": 4, "sequence_parallel": True}, 1, 4),
        ({"cp": 3, "tp": 2, "sequence_parallel": True, "recipe": "tensorwise"}, 6, 96),
        ({"cp": 4, "tp": 2, "sequence_parallel": True, "recipe": "tensorwise"}, 8, 128),
        ({"cp": 4, "tp": 2, "recipe": "tensorwise"}, 8, 64),
        ({"cp": 2, "tp": 4, "sequence_parallel": True, "recipe": "blockwise"}, 4, 1024),
    ],
)
def test_multiples(options: dict, sequence: int, total: int) -> None:
    assert Alignment.for_(**options) == Alignment(sequence_multiple=sequence, total_multiple=total)


@settings(deadline=None)
@given(length=st.integers(0, 10**6), cp=st.integers(1, 8), recipe=st.sampled_from([None, *RECIPES]))
def test_rounds_up_to_the_next_multiple(length: int, cp: int, recipe: Recipe | None) -> None:
    align = Alignment.for_(cp=cp, recipe=recipe)
    for padded, multiple in (
        (align.padded_length(length), align.sequence_multiple),
        (align.padded_total(length), align.total_multiple),
    ):
        assert padded % multiple == 0
        assert 0 <= padded - length < multiple
    assert align.padded_lengths([length, 0]).tolist() == [align.padded_length(length), 0]
    assert align.padded_lengths(np.asarray([length], dtype=np.uint32)).dtype == np.int64


def test_three_thousand_batches_break_no_assertion() -> None:
    rng = np.random.default_rng(0)
    unaligned = 0

    for _ in range(3_000):
        cp = int(rng.choice([1, 2, 3, 4, 8]))
        tp = int(rng.choice([1, 2, 4, 8]))
        sp = bool(rng.integers(2))
        recipe = rng.choice(np.asarray([None, *RECIPES], dtype=object))
        layout: Layout = str(rng.choice(get_args(Layout)))
        align = Alignment.for_(cp=cp, tp=tp, sequence_parallel=sp, recipe=recipe, layout=layout)
        lengths = align.padded_lengths(rng.integers(1, 600, size=rng.integers(1, 40))).tolist()
        total = sum(lengths)
        slots = align.padded_total(total)
        lengths.append(slots - total)  # the trailing pad, a sequence of its own
        align.check(slots)
        assert not any(length % align.sequence_multiple for length in lengths)
        assert slots % cp == 0
        gathered = slots // cp
        assert not sp or gathered % tp == 0
        local = gathered // tp if sp else gathered
        assert kernel_asserts(recipe, local, gathered) == []
        if cp > 1 and layout == "dual_chunk":
            assert all(n % (2 * cp) == 0 for n in lengths)
        unaligned += bool(kernel_asserts(recipe, total // cp, total // cp))

    assert unaligned > 300  # without the padding they do break


FOR_TWO = Alignment.for_(cp=2, tp=2, sequence_parallel=True, recipe="blockwise")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: FOR_TWO.check(544), "544 slots; wanted a multiple of 512. THDDataModule pads"),
        (lambda: Alignment.for_(cp=0), "cp=0; wanted 1 or more"),
        (lambda: Alignment.for_(recipe="delayed"), "recipe='delayed'; wanted one of tensorwise"),
        (
            lambda: Alignment(sequence_multiple=8, total_multiple=12),
            "is a sequence too. Use total_multiple=24",
        ),
        (lambda: Alignment().padded_length(-1), "length=-1; wanted 0 or more"),
        (lambda: Alignment().padded_lengths([2, -3]), "lengths.1. is -3; wanted 0 or more"),
    ],
)
def test_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
