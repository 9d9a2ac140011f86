import pytest

from lightning_thd.packing import Packs, Sequences


@pytest.mark.parametrize("n", [0, -1, 2.0, "8", True])
def test_refuse_what_is_no_count(n: object) -> None:
    for kind in (Packs, Sequences):
        with pytest.raises(
            (ValueError, TypeError), match=rf"{kind.__name__}.n.*wanted .* Pass {kind.__name__}\("
        ):
            kind(n)
