import dataclasses

import pytest

from lightning_thd.packing import Packs, Sequences


@pytest.mark.parametrize("kind", [Packs, Sequences])
def test_hold_a_number_and_compare_by_it(kind: type) -> None:
    assert kind(8).n == 8
    assert kind(8) == kind(n=8) != kind(9)
    assert repr(kind(8)) == f"{kind.__name__}(n=8)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind(8).n = 9


@pytest.mark.parametrize("n", [0, -1, 2.0, "8", True])
def test_refuse_what_is_no_count(n: object) -> None:
    for kind in (Packs, Sequences):
        with pytest.raises(
            (ValueError, TypeError), match=rf"{kind.__name__}.n.*wanted .* Pass {kind.__name__}\("
        ):
            kind(n)
