"""Every sequence of every source exactly as often as the mixture says, in any order of asking."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_thd.packing import Packs, Sequences
from lightning_thd.packing.mixtures import Mixing, MixturePlanner, make_mixture, share_out, whole_shares

SIZES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 40), min_size=1)


@settings(max_examples=20)
@given(sizes=SIZES, seed=st.integers(0, 9), data=st.data())
def test_shares_are_within_one_sequence_of_the_weights(sizes: dict[str, int], seed: int, data: Any) -> None:
    # Further apart, an epoch may take more than 1,000 passes over a source, which is refused.
    weights = {name: data.draw(st.floats(0.5, 2.0)) for name in sizes}
    counts = share_out(sizes, weights)
    for name, count in counts.items():
        assert abs(count - sum(counts.values()) * weights[name] / sum(weights.values())) < 1
        assert count >= sizes[name]  # "longest": each is used whole

    lengths = {name: np.full(size, 3) for name, size in sizes.items()}
    mixture = make_mixture(lengths, weights, seed=seed)
    drawn: Counter[int] = Counter()

    for epoch in range(3):
        indices = mixture.indices(epoch, np.arange(mixture.total))
        assert np.bincount(mixture.source_of(indices), minlength=len(sizes)).tolist() == list(counts.values())
        drawn.update(indices.tolist())
        start = 0
        for size in sizes.values():  # after any number of epochs: as often as any other, or once more
            uses = [drawn[i] for i in range(start, start + size)]
            assert max(uses) - min(uses) <= 1
            start += size


def planner(step: Packs | Sequences, *, seed: int = 0, **options: Any) -> MixturePlanner:
    rng = np.random.default_rng(seed)
    lengths = {name: rng.integers(1, 17, size) for name, size in (("a", 50), ("b", 130), ("c", 7))}
    mixture = make_mixture(lengths, {"a": 0.5, "b": 0.3, "c": 0.2}, seed=seed)
    flat = np.concatenate(list(lengths.values()))
    return MixturePlanner(flat, 32, mixture=mixture, global_batch=step, window=32, seed=seed, **options)


@pytest.mark.parametrize("step", [Packs(4), Sequences(10)])
def test_epochs_hold_their_draws_whatever_the_ranks(step: Packs | Sequences) -> None:
    made = planner(step)
    other = planner(step)
    assert other.resume(made.state(1, 4)) == (1, 4)
    with pytest.raises(ValueError, match="lengths was"):
        planner(step, seed=1).resume(made.state(1, 4))

    for epoch in (1, 0, 2):
        pure = [p.step(epoch, 3, 2).spans.index.tolist() for p in (made, other)]
        assert pure[0] == pure[1]
        by_ranks = []
        for dp in (1, 2, 4):
            plans = [made.step(epoch, k, dp) for k in range(made.num_steps(epoch))]
            shares = sorted(
                i for plan in plans for rank in plan.indices_by_rank() for m in rank for i in m.tolist()
            )
            assert shares == sorted(made.mixture.indices(epoch, np.arange(made.mixture.total)).tolist())
            by_ranks.append([sorted(plan.spans.index.tolist()) for plan in plans])
            assert all(plan.real_tokens == int(made._lengths[plan.spans.index].sum()) for plan in plans)
        assert by_ranks[0] == by_ranks[1] == by_ranks[2]
        whole = np.concatenate([plan.spans.index[plan.spans.start == 0] for plan in plans])
        shares = np.bincount(made.mixture.source_of(whole), minlength=3) / len(whole)
        assert dict(zip(made.mixture.names, shares, strict=True)) == pytest.approx(
            {"a": 0.5, "b": 0.3, "c": 0.2}, abs=1 / 217
        )


@settings(max_examples=20, deadline=None)
@given(sizes=SIZES, n=st.integers(1, 30), epoch=st.integers(0, 2), data=st.data())
def test_each_step_follows_the_shares_to_within_one_sequence(
    sizes: dict[str, int], n: int, epoch: int, data: Any
) -> None:
    weights = {name: data.draw(st.floats(0.5, 2.0)) for name in sizes}
    mixture = make_mixture({name: np.full(size, 3) for name, size in sizes.items()}, weights)
    made = MixturePlanner(np.full(sum(sizes.values()), 3), 32, mixture=mixture, global_batch=Sequences(n))
    shares = mixture.counts / mixture.total
    for k in range(made.num_steps(epoch)):
        index = made.step(epoch, k).spans.index
        counts_of_step = np.bincount(mixture.source_of(index), minlength=len(sizes))
        # An epoch whose sequences no step divides leaves some to its last, which moves the shares a little.
        assert np.abs(counts_of_step - len(index) * shares).max() <= 1 + 1 / max(1, mixture.total // n)


def test_shares_of_tokens_hold_for_sources_of_other_lengths() -> None:
    rng = np.random.default_rng(0)
    lengths = {"long": rng.integers(100, 900, 300), "short": rng.integers(0, 30, 500), "cut": np.full(9, 999)}
    weights = {"long": 3.0, "short": 1.0, "cut": 1.0}
    mixture = make_mixture(lengths, weights, Mixing(shares="tokens"))
    drawn = mixture.indices(0, np.arange(mixture.total))
    tokens = np.concatenate(list(lengths.values()))[drawn]
    tokens_of_source = np.bincount(mixture.source_of(drawn), weights=tokens)
    assert tokens_of_source / tokens_of_source.sum() == pytest.approx([0.6, 0.2, 0.2], rel=0.02)


def test_empty_and_too_long_sequences_are_never_drawn() -> None:
    mixture = make_mixture({"a": np.array([3, 0, 4]), "b": np.array([9, 2])}, {"a": 1, "b": 1}, most=8)
    assert set(mixture.indices(0, np.arange(mixture.total)).tolist()) == {0, 2, 4}


def test_weights_become_whole_numbers_in_the_same_proportions() -> None:
    assert whole_shares([0.3, 0.7]) == [3, 7]
    assert whole_shares(np.array([3, 7])) == [3, 7]
    assert whole_shares(np.float32([0.25, 0.75])) == [1, 3]


def test_an_epoch_ends_with_the_shortest_source_or_after_a_number_of_sequences() -> None:
    sizes = {"a": 10, "b": 30}
    weights = {"a": 1.0, "b": 1.0}
    assert share_out(sizes, weights, Mixing(epoch="shortest")) == {"a": 10, "b": 10}
    assert share_out(sizes, weights, Mixing(epoch=7)) == {"a": 4, "b": 3}


def test_rounding_neither_leaves_out_nor_repeats_a_sequence() -> None:
    # Rounding alone would leave out one of c's 25 sequences.
    whole = share_out({"a": 3, "b": 2, "c": 25}, {"a": 0.3, "b": 0.3, "c": 2.0}, Mixing(epoch="longest"))
    assert whole == {"a": 4, "b": 4, "c": 25}
    # Rounding alone would use one of a's 26 sequences twice.
    once = share_out({"a": 26, "b": 19, "c": 3}, {"a": 1.0, "b": 0.05, "c": 0.05}, Mixing(epoch="shortest"))
    assert once == {"a": 26, "b": 1, "c": 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: share_out({"a": 3}, {"a": 0.0}), "The weight of 'a' is 0.0; wanted a finite number above 0"),
        (lambda: share_out({"a": 3}, {"a": float("nan")}), "The weight of 'a' is nan"),
        (lambda: share_out({"a": 3}, {"a": torch.ones(1, dtype=torch.uint16)}), "'a' is a Tensor"),
        (lambda: share_out({"a": 3}, {"b": 1.0}), r"sizes of \['a'\] and weights of \['b'\]"),
        (lambda: share_out({}, {}), "Give both of each"),
        (lambda: share_out({"a": 0}, {"a": 1.0}), "A source has at least one sequence"),
        (lambda: share_out({"a": 3, "b": 3}, {"a": 1, "b": 1e-9}, Mixing(epoch=9)), "has none of 'b'"),
        (lambda: share_out({"a": 9, "b": 9}, {"a": 1e-9, "b": 1}), "more than 1,000 passes over 'b'"),
        (lambda: share_out({"a": 9, "b": 9}, {"a": 1e300, "b": 1}), "more than 1,000 passes over 'a'"),
        (lambda: share_out({"a": 9}, torch.ones(3, dtype=torch.uint16)), "wanted Mapping"),
        (lambda: Mixing(epoch=0), "epoch=0; wanted 1 or more"),
        (lambda: Mixing(shares="words"), "shares='words'; wanted one of sequences, tokens"),  # type: ignore[arg-type]
    ],
)
def test_says_what_is_wrong(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()
