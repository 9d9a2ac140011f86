import itertools

import numpy as np
import numpy.typing as npt
import pytest

from lightning_thd.packing.entries import Entries, make_entries, summarize
from lightning_thd.packing.lengths import Slots
from lightning_thd.packing.windows import WindowedPacks, count_windows, make_windows, window_members

from .shapes import draw

SLOTS = Slots(usable=8192, multiple=1)


def entries_of(lengths: npt.NDArray[np.int64]) -> Entries:
    return make_entries(lengths, summarize(lengths), SLOTS, oversize="error")


def read(packs: WindowedPacks, epoch: int, first: int = 0, last: int | None = None) -> list[tuple[int, ...]]:
    spans, offsets = packs.read(epoch, first, packs.total if last is None else last)
    return [tuple(spans.index[a:b].tolist()) for a, b in itertools.pairwise(offsets)]


def test_an_epoch_shuffles_windows_packs_and_ties_but_never_members() -> None:
    lengths = draw("chat", 2_000)
    packs = make_windows(entries_of(lengths), SLOTS, 500, 0)
    home = np.empty(2_000, int)
    for window in range(4):
        home[window_members(packs.entries, 500, 0, window, window + 1)] = window
    epochs = [read(packs, epoch) for epoch in range(6)]
    orders = [tuple(dict.fromkeys(home[pack[0]] for pack in epoch)) for epoch in epochs]

    assert all(len({home[i] for i in pack}) == 1 for epoch in epochs for pack in epoch)
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len(set(orders)) > 1

    # Inside a window: the packs come in another order, and equal lengths change places between packs.
    inside = [[pack for pack in epoch if home[pack[0]] == 0] for epoch in epochs[:2]]
    assert inside[0] != inside[1]
    assert {frozenset(pack) for pack in inside[0]} != {frozenset(pack) for pack in inside[1]}

    sizes = [sorted(tuple(sorted(lengths[list(pack)])) for pack in packs_) for packs_ in inside]
    assert sizes[0] == sizes[1]


def test_any_range_of_packs_is_the_range_of_all() -> None:
    packs = make_windows(entries_of(draw("chat", 2_000)), SLOTS, 300, 0)
    everything = read(packs, 1)
    for first, last in ((0, 1), (0, packs.total), (20, 75), (packs.total - 1, packs.total)):
        assert read(packs, 1, first, last) == everything[first:last]


def test_workers_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_thd.packing.windows._BLOCK", 700)  # two windows a block
    entries = entries_of(draw("chat", 3_000))
    counts = count_windows(entries, SLOTS, 300, 0)
    assert counts.tolist() == count_windows(entries, SLOTS, 300, 0, num_workers=2).tolist()


def test_the_digest_of_lengths_is_of_the_numbers_not_of_their_type() -> None:
    values = np.random.default_rng(0).integers(1, 1_000, 3_000_000)  # three blocks
    digests = {summarize(values.astype(kind)).digest for kind in (np.uint16, np.int32, np.int64)}
    assert len(digests) == 1
    for changed in (values[::-1], values[:-1], np.append(values[:-1], values[-1] + 1)):
        assert summarize(changed).digest not in digests
