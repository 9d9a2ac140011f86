"""State-space layers: which are known, how fused kernels are called, and what is refused."""

from __future__ import annotations

import functools
import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("transformers")

from lightning_thd._known_bad import known_problems
from lightning_thd._static import static_shapes
from lightning_thd.batch import THDBatch
from lightning_thd.models import register_thd
from lightning_thd.models.adapted import adapt
from lightning_thd.models.families import recurrent
from lightning_thd.models.families.padded_groups import plan_groups, plan_static_group, run_grouped
from lightning_thd.models.families.recurrent import MIXERS, Recurrent, can_run
from lightning_thd.models.pack import Scope, scoped
from lightning_thd.models.passing.adopt import _KERNELS
from lightning_thd.models.refusals import refuse_unknown_layers
from tests.models import matrix
from tests.models.families import build

register_thd()


class Mamba2Mixer(nn.Module):
    def forward(self, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any) -> Tensor:
        return hidden_states.cumsum(1)


def announced(batch: THDBatch) -> AbstractContextManager[None]:
    """What a model with "thd" does around its layers."""
    return scoped(Scope(batch.boundaries, None, module=nn.Identity()))


def mixer() -> Any:
    layer = Mamba2Mixer()
    adapt(layer, Recurrent)
    return layer


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
        mixer()(torch.randn(1, slots, 3), **given)


def test_every_known_layer_of_transformers_is_found_by_its_name() -> None:
    for name in ("mamba", "bamba", "qwen3_next", "lfm2", "recurrent_gemma", "minimax"):
        model = build(name, "thd")
        refuse_unknown_layers(model)
        adopted = {type(m).__name__ for m in model.modules() if isinstance(m, Recurrent)}
        assert len(adopted & MIXERS.keys()) == 1


# ---- Fused kernels, on doubles, because they need a CUDA device

FLA = ("fla", "causal_conv1d")
SSD = ("mamba_ssm", "causal_conv1d")
NAMES = ("seq_idx", "cu_seqlens", "cu_seqlens_cpu")


@pytest.mark.parametrize(
    ("installed", "recorded", "usable"),
    [
        ({}, False, {FLA, SSD}),
        ({}, True, {SSD}),  # fla reads the device, which a recorded step cannot
        ({"triton": "3.6.0"}, False, {SSD}),  # refuses its gated backward on Hopper
        ({"triton": "3.6.0", "tilelang": "0.1.15"}, False, {FLA, SSD}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*refuses its gated backward.*install triton>=3.7.1 or tilelang")
def test_kernels_run_where_all_is_well(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], recorded: bool, usable: set[Any]
) -> None:
    versions = {"transformers": "5.23.0", "fla-core": "0.6.0", "mamba-ssm": "2.3.2", "triton": "3.7.1"}
    versions |= installed
    reading = functools.partial(known_problems, version_of=versions.get)
    fakes = {"_on_gpu": lambda _: True, "available": lambda _: True, "_capability": lambda _: 9}
    for name, fake in {**fakes, "known_problems": reading}.items():
        monkeypatch.setattr(recurrent, name, fake)
    recurrent._is_sound.cache_clear()
    with static_shapes() if recorded else nullcontext():
        assert {x for x in (FLA, SSD, None) if can_run(x, torch.zeros(1, 5, 4))} == usable
    recurrent._is_sound.cache_clear()


def recorded(own: Any, told: list[Any]) -> Any:
    @functools.wraps(own)
    def record(*args: Any, **kwargs: Any) -> Any:
        told.append([own.__name__, *(kwargs.pop(x, None) for x in NAMES)])
        return inspect.unwrap(own)(*args, **kwargs)

    return record


@pytest.mark.parametrize(
    "name",
    ["mamba2", "bamba", "falcon_h1", "zamba2", "qwen3_next", "olmo_hybrid", "kimi_linear"],
)
def test_every_kernel_of_a_layer_is_told_the_boundaries(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """transformers drops keywords that a kernel does not take, so a wrong name would mix the sequences."""
    batch, _ = matrix.packs()
    model = build(name, "thd")
    calls = []
    module = sys.modules[type(model).__module__]
    for kernel in (x for x in _KERNELS if hasattr(getattr(module, x, None), "__wrapped__")):
        monkeypatch.setattr(module, kernel, recorded(getattr(module, kernel), calls))
    monkeypatch.setattr(recurrent, "can_run", lambda kernels, tokens: kernels is not None)
    model(**batch.hf_kwargs())
    for kernel, ids, offsets, on_host in calls:
        if "delta" in kernel:
            assert on_host.tolist() == offsets.tolist() == batch.cu_seqlens.tolist()
        else:
            assert ids.tolist() == [[0] * 7 + [1] + [2] * 16 + [3] * 3 + [4] * 8]
    assert len({kernel for kernel, *_ in calls}) > 1


# ---- Padded groups

LENGTHS = st.lists(st.integers(0, 200), min_size=1, max_size=30).filter(sum)


def running_sum(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.cumsum(1) if bias is None else (x + bias).cumsum(1)


class TakesNothingMore(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class DropsOffsets(nn.Module):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states


def test_a_layer_that_would_drop_the_boundaries_never_runs_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recurrent, "is_checked", lambda: True)
    assert not recurrent._hands_boundaries_on(TakesNothingMore)
    assert recurrent._hands_boundaries_on(DropsOffsets)  # as Mamba2 does
    monkeypatch.setattr(recurrent, "is_checked", lambda: False)  # a release that nobody has looked at
    assert not recurrent._hands_boundaries_on(DropsOffsets)
    monkeypatch.setitem(recurrent.MIXERS, "DropsOffsets", FLA)
    monkeypatch.setattr(recurrent, "can_run", lambda kernels, tokens: kernels is not None)
    monkeypatch.setattr(recurrent, "_grouped", lambda *_, **__: "groups")
    layer = DropsOffsets()
    adapt(layer, Recurrent)
    with announced(THDBatch.collate([{"input_ids": [1, 2]}, {"input_ids": [3]}])):
        assert layer(torch.zeros(1, 3, 4)) == "groups"


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


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8), spare=st.integers(0, 4))
def test_a_group_of_fixed_size_does_what_fitted_groups_do(lengths: list[int], spare: int) -> None:
    slots = sum(lengths)
    longest = max(lengths) + spare
    if slots == 0 or len(lengths) * longest > 32 * slots:
        return
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    groups = plan_static_group(offsets, longest, slots)
    assert [tuple(source.shape) for source in groups.sources] == [(len(lengths), longest)]
    x = torch.randn(1, slots, 2)
    want = run_grouped(running_sum, (x,), {}, plan_groups(lengths, torch.device("cpu")), slots)
    assert torch.allclose(run_grouped(running_sum, (x,), {}, groups, slots), want)


def test_groups_worked_examples_and_limit() -> None:
    x = torch.ones(1, 5, 1)
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 5, 1)
    groups = plan_groups([2, 3], torch.device("cpu"))
    want = torch.tensor([2.0, 5.0, 4.0, 9.0, 15.0]).view(1, 5, 1)

    assert torch.equal(run_grouped(running_sum, (x,), {"bias": bias}, groups, 5), want)
    # Per-token arguments are found inside tuples, and final states are not mistaken for tokens.
    pair = run_grouped(lambda x, both: (running_sum(x, both[0]), x[:, -1]), (x, (bias, None)), {}, groups, 5)
    assert torch.equal(pair[0], want)
    assert pair[1] is None

    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    groups = plan_static_group(offsets, 4, 5)
    assert groups.sources[0].tolist() == [[0, 1, 5, 5], [2, 3, 4, 5]]
    assert groups.back.tolist() == [0, 1, 4, 5, 6]
    with pytest.raises(ValueError, match="would run 2 sequences padded to 100 for 5 slots"):
        plan_static_group(offsets, 100, 5)
