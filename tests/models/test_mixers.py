"""State-space layers: which are known, how fused kernels are called, and what is refused."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("transformers")

from lightning_thd import _known_bad
from lightning_thd._known_bad import KnownBad, known_problems
from lightning_thd._static import static_shapes
from lightning_thd.batch import THDBatch
from lightning_thd.models import mixers, packed, register_thd
from lightning_thd.models.mixers import MIXERS, adopt_mixers, boundaries, can_run
from lightning_thd.models.pack import Pack, Scope, scoped
from lightning_thd.models.padded_groups import plan_groups, plan_static_group, run_grouped
from lightning_thd.models.refusals import refuse_unknown_layers
from tests.models import matrix
from tests.models.families import build

register_thd()


class Mamba2Mixer(nn.Module):
    """Stands for the layer of transformers with its fused kernels installed: it records what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[dict[str, Any]] = []

    def forward(self, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any) -> Tensor:
        self.told.append(kwargs)
        return hidden_states.cumsum(1)


def announced(batch: THDBatch) -> AbstractContextManager[None]:
    """What a model with "thd" does around its layers."""
    return scoped(Scope(Pack.from_batch(batch), None, module=nn.Identity()))


adopt_mixers(Mamba2Mixer)  # searches the module it comes from, this one


def test_outside_a_pack_nothing_changes() -> None:
    layer, x = Mamba2Mixer(), torch.randn(2, 5, 3)
    assert torch.equal(layer(x, seq_idx=None), x.cumsum(1))
    assert layer.told == [{"seq_idx": None}]


def test_a_pack_that_no_model_announced_is_none_of_its_business() -> None:
    layer, (batch, _) = Mamba2Mixer(), matrix.packs()
    x = torch.randn(1, 35, 3)
    with packed(batch):
        assert torch.equal(layer(x), x.cumsum(1))


def test_without_kernels_the_layer_runs_on_groups() -> None:
    layer, (batch, _) = Mamba2Mixer(), matrix.packs()
    x = torch.randn(1, 35, 3)
    with announced(batch):
        out = layer(x, cu_seq_lens_q=batch.cu_seqlens, max_length_q=16)
    want = torch.cat([part.cumsum(1) for part in x.split(batch.lengths, 1)], 1)
    torch.testing.assert_close(out, want)
    assert layer.told == [{}]  # one group, and no boundaries that a layer of rows would trip over


def test_with_kernels_the_layer_is_told_the_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (batch, _) = Mamba2Mixer(), matrix.packs()
    monkeypatch.setattr(mixers, "can_run", lambda kernels, tokens: kernels == mixers._SSD)
    with announced(batch):
        for _ in range(2):
            layer(torch.randn(1, 35, 3))
    first, second = layer.told
    assert first["seq_idx"].dtype == torch.int32
    assert first["seq_idx"].tolist() == [[0] * 7 + [1] + [2] * 16 + [3] * 3 + [4] * 8]
    assert first["seq_idx"] is second["seq_idx"]  # worked out once a batch
    assert first["cu_seq_lens_q"] is batch.cu_seqlens_padded


@pytest.mark.parametrize(
    ("slots", "given", "message"),
    [
        (35, {"cache_params": object()}, "Mamba2Mixer got a pack and cache_params"),
        (35, {"attention_mask": object()}, "Mamba2Mixer got a pack and attention_mask"),
        (9, {}, r"got \(1, 9, 3\) while .* pack of 35 slots"),
    ],
)
def test_a_cache_a_mask_and_other_rows_are_refused(slots: int, given: dict[str, Any], message: str) -> None:
    (batch, _) = matrix.packs()
    with announced(batch), pytest.raises(ValueError, match=message):
        Mamba2Mixer()(torch.randn(1, slots, 3), **given)


def test_every_known_layer_of_transformers_is_found_by_its_name() -> None:
    for name in ("mamba", "bamba", "qwen3_next", "lfm2", "recurrent_gemma", "minimax"):
        model = build(name, "thd")
        refuse_unknown_layers(model)
        adopted = {type(m).__name__ for m in model.modules() if hasattr(type(m).forward, "_thd_mixer")}
        assert len(adopted & MIXERS.keys()) == 1


# ---- Fused kernels, on doubles, because they need a CUDA device

FLA, SSD = ("fla", "causal_conv1d"), ("mamba_ssm", "causal_conv1d")
TOKENS = torch.zeros(1, 5, 4)


def two_sequences() -> Pack:
    samples = [{"input_ids": torch.arange(3)}, {"input_ids": torch.arange(2)}]
    return Pack.from_batch(THDBatch.collate(samples))


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A device of compute capability 9 and packages that all import; versions as the test says."""
    found = {"transformers": "5.23.0", "fla-core": "0.6.0", "mamba-ssm": "2.3.2", "triton": "3.7.1"}
    monkeypatch.setattr(mixers, "_on_gpu", lambda tokens: True)
    monkeypatch.setattr(mixers, "available", lambda name: True)
    monkeypatch.setattr(mixers, "_capability", lambda device: 9)
    reading = functools.partial(known_problems, version_of=found.get)
    monkeypatch.setattr(mixers, "known_problems", reading)
    mixers._is_sound.cache_clear()
    yield found
    mixers._is_sound.cache_clear()


def test_kernels_run_where_all_is_well(versions: dict[str, str]) -> None:
    assert can_run(FLA, TOKENS)
    assert can_run(SSD, TOKENS)
    assert not can_run(None, TOKENS)


def test_a_step_that_is_recorded_takes_padded_groups_where_fla_reads_the_device(
    versions: dict[str, str],
) -> None:
    with static_shapes():
        assert not can_run(FLA, TOKENS)
        assert can_run(SSD, TOKENS)


def test_the_gated_backward_on_hopper_needs_another_triton_or_tilelang(versions: dict[str, str]) -> None:
    versions["triton"] = "3.6.0"
    with pytest.warns(UserWarning, match=r"refuses its gated backward.*install triton>=3.7.1 or tilelang"):
        assert not can_run(FLA, TOKENS)
    assert can_run(SSD, TOKENS)
    mixers._is_sound.cache_clear()
    versions["tilelang"] = "0.1.15"
    assert can_run(FLA, TOKENS)


class GatedDelta(nn.Module):
    """Its keywords go to the kernel, as in transformers."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> dict[str, Any]:
        return kwargs


def rule() -> None:
    """What transformers wraps so that keywords a kernel does not take are left out."""


@functools.wraps(rule)
def wrapped() -> None:
    """Stands for it."""


@pytest.mark.parametrize("filters", [True, False])
def test_kernels_of_fla_are_told_the_offsets_on_the_host(
    monkeypatch: pytest.MonkeyPatch, filters: bool
) -> None:
    module = types.ModuleType("modeling_of_a_test")
    module.torch_chunk_gated_delta_rule = wrapped if filters else rule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(GatedDelta, "__module__", module.__name__)
    one = two_sequences()
    told = boundaries(FLA, one, GatedDelta)
    assert told["seq_idx"].tolist() == [[0, 0, 0, 1, 1]]
    assert told["cu_seq_lens_q"] is one.cu_seqlens_q
    assert ("cu_seqlens_cpu" in told) == filters
    if filters:
        assert told["cu_seqlens_cpu"].tolist() == [0, 3, 5]
        assert told["cu_seqlens_cpu"].device.type == "cpu"
        # The same tensor for all layers: kernels remember by identity what they worked out.
        assert boundaries(FLA, one, GatedDelta)["cu_seqlens_cpu"] is told["cu_seqlens_cpu"]
    assert "cu_seqlens_cpu" not in boundaries(SSD, one, GatedDelta)


@pytest.mark.parametrize(
    ("versions", "capability", "count"),
    [
        ({"a": "1.5", "b": "2.0"}, 9, 1),
        ({"a": "1.5+cu130", "b": "2.0rc1"}, 9, 1),
        ({"a": "1.5", "b": "2.0"}, None, 0),
        ({"a": "2.5", "b": "2.0"}, 9, 0),
        ({"a": "1.5"}, 9, 0),
        ({"a": "1.5", "b": "2.0", "c": "1"}, 9, 0),
    ],
)
def test_an_entry_needs_all_it_names(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], capability: int | None, count: int
) -> None:
    entry = KnownBad(
        feature="x", versions={"a": "<2", "b": ">=1"}, without="c", capability=9, problem="p", instead="i"
    )
    monkeypatch.setattr(_known_bad, "TABLE", (entry,))
    assert len(known_problems("x", capability=capability, version_of=versions.get)) == count
    assert known_problems("y", capability=capability, version_of=versions.get) == []


# ---- Padded groups

LENGTHS = st.lists(st.integers(0, 200), min_size=1, max_size=30).filter(sum)


def running_sum(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.cumsum(1) if bias is None else (x + bias).cumsum(1)


@given(lengths=LENGTHS)
def test_a_causal_function_on_groups_is_the_function_on_every_sequence(lengths: list[int]) -> None:
    slots = sum(lengths)
    x = torch.arange(slots * 2, dtype=torch.float64).view(1, slots, 2).requires_grad_()
    groups = plan_groups(lengths, torch.device("cpu"))
    out = run_grouped(running_sum, (x,), {}, groups, slots)
    want = torch.cat([part.cumsum(1) for part in x.split(lengths, 1)], 1)
    assert torch.equal(out, want)
    weights = torch.randn_like(want)
    assert torch.allclose(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (out, want)))


@given(lengths=LENGTHS)
def test_padding_is_bounded_and_groups_are_few(lengths: list[int]) -> None:
    groups = plan_groups(lengths, torch.device("cpu"))
    real = [int((source < sum(lengths)).sum()) for source in groups.sources]
    assert sum(real) == sum(lengths)
    for source, count in zip(groups.sources, real, strict=True):
        assert source.shape[1] <= 32 or count >= source.numel() * 2 / 3
    assert len(groups.sources) <= 8  # log of 200 / 32 to the base 1.5, and one for the short ones


def test_per_token_arguments_are_regrouped_wherever_they_stand() -> None:
    x, bias = torch.ones(1, 5, 1), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 5, 1)
    groups = plan_groups([2, 3], torch.device("cpu"))
    want = torch.tensor([2.0, 5.0, 4.0, 9.0, 15.0]).view(1, 5, 1)
    assert torch.equal(run_grouped(running_sum, (x,), {"bias": bias}, groups, 5), want)
    pair = run_grouped(lambda x, both: (running_sum(x, both[0]), both[1]), (x, (bias, None)), {}, groups, 5)
    assert torch.equal(pair[0], want)
    assert pair[1] is None


def test_final_states_are_not_mistaken_for_tokens() -> None:
    groups = plan_groups([2, 3], torch.device("cpu"))
    x = torch.ones(1, 5, 1)
    out, state = run_grouped(lambda x: (x, torch.zeros(2, 3, 1)), (x,), {}, groups, 5)
    assert torch.equal(out, x)
    assert state is None


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8), spare=st.integers(0, 4))
def test_a_group_of_fixed_size_does_what_fitted_groups_do(lengths: list[int], spare: int) -> None:
    slots, longest = sum(lengths), max(lengths) + spare
    if slots == 0 or len(lengths) * longest > 32 * slots:
        return
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    groups = plan_static_group(offsets, longest, slots)
    assert [tuple(source.shape) for source in groups.sources] == [(len(lengths), longest)]
    x = torch.randn(1, slots, 2)
    want = run_grouped(running_sum, (x,), {}, plan_groups(lengths, torch.device("cpu")), slots)
    assert torch.allclose(run_grouped(running_sum, (x,), {}, groups, slots), want)


def test_a_group_of_fixed_size_worked_example_and_limit() -> None:
    groups = plan_static_group(torch.tensor([0, 2, 5], dtype=torch.int32), 4, 5)
    assert groups.sources[0].tolist() == [[0, 1, 5, 5], [2, 3, 4, 5]]
    assert groups.back.tolist() == [0, 1, 4, 5, 6]
    with pytest.raises(
        ValueError, match=r"would run 2 sequences padded to 100 for 5 tokens. Install the fused"
    ):
        plan_static_group(torch.tensor([0, 2, 5], dtype=torch.int32), 100, 5)
