from __future__ import annotations

import pytest

from lightning_thd.attention.spec import AttentionSpec, make_spec


@pytest.mark.parametrize(
    ("options", "left", "right"),
    [
        ({}, -1, 0),
        ({"causal": False}, -1, -1),
        ({"window": 1}, 0, 0),
        ({"window": 512}, 511, 0),
        ({"window": (511, 0)}, 511, 0),
        ({"window": (511, 7)}, 511, 0),  # causal wins over a right side, as in flash-attn
        ({"window": (-1, -1)}, -1, 0),
        ({"window": (3, 2), "causal": False}, 3, 2),
        ({"window": (-1, 2), "causal": False}, -1, 2),
        ({"window": (3, -1), "causal": False}, 3, -1),
    ],
)
def test_window_sides(options: dict, left: int, right: int) -> None:
    spec = make_spec(64, **options)
    assert (spec.left, spec.right) == (left, right)
    assert spec.causal == (right == 0)
    assert spec.windowed == (left >= 0 or right > 0)


def test_scale_and_softcap_defaults() -> None:
    assert make_spec(64) == AttentionSpec(left=-1, right=0, scale=0.125, softcap=0.0)
    assert make_spec(64, scale=0.3, softcap=50.0) == AttentionSpec(left=-1, right=0, scale=0.3, softcap=50.0)
    assert make_spec(64, softcap=None) == make_spec(64, softcap=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"window=0: want None, the number of keys a query sees \(at least 1"),
        ({"window": -1}, r"window=-1: want None"),
        ({"window": True}, r"window=True: want None"),
        ({"window": 2.5}, r"window=2.5: want None"),
        ({"window": (1, 2, 3)}, r"window=\(1, 2, 3\): want \(left, right\)"),
        ({"window": (-2, 0)}, r"want \(left, right\), two ints of at least -1"),
        ({"window": 8, "causal": False}, r"window=8 with causal=False .* for example window=\(4, 4\)"),
        ({"scale": 0.0}, r"scale=0.0 is not a positive finite number"),
        ({"scale": float("inf")}, r"scale=inf"),
        ({"scale": float("nan")}, r"scale=nan"),
        ({"softcap": -1.0}, r"softcap=-1.0 is negative"),
        ({"softcap": float("nan")}, r"softcap=nan"),
    ],
)
def test_messages(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_spec(64, **options)
