"""When a layer's own kernels run, and what they are told: on doubles, as the kernels want a CUDA device."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_thd import THDBatch, _known_bad
from lightning_thd._known_bad import TABLE, KnownBad, known_problems
from lightning_thd._static import static_shapes
from lightning_thd.models import mixers
from lightning_thd.models.mixers import boundaries, can_run
from lightning_thd.models.pack import Pack

FLA, SSD = ("fla", "causal_conv1d"), ("mamba_ssm", "causal_conv1d")
TOKENS = torch.zeros(1, 5, 4)


def pack() -> Pack:
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


def test_without_a_device_nothing_is_fused() -> None:
    assert not can_run(FLA, TOKENS)


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


def test_state_space_kernels_that_never_see_the_boundaries_are_left_alone(versions: dict[str, str]) -> None:
    versions["transformers"] = "5.14.1"
    with pytest.warns(UserWarning, match="hands no seq_idx.*install transformers>=5.15"):
        assert not can_run(SSD, TOKENS)


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
    one = pack()
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


def test_the_installed_transformers_hands_keywords_on() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    layer = modeling.Qwen3NextGatedDeltaNet
    filters = hasattr(modeling.torch_chunk_gated_delta_rule, "__wrapped__")
    assert ("cu_seqlens_cpu" in boundaries(FLA, pack(), layer)) == filters


def test_mixers_name_only_kernels_that_can_be_asked_for() -> None:
    named = {name for kernels in mixers.MIXERS.values() for name in kernels or ()}
    assert named == {"mamba_ssm", "causal_conv1d", "fla"}


@pytest.mark.parametrize(
    ("versions", "capability", "count"),
    [
        ({"a": "1.5", "b": "2.0"}, 9, 1),
        ({"a": "1.5+cu130", "b": "2.0rc1"}, 9, 1),
        ({"a": "1.5", "b": "2.0"}, 10, 0),
        ({"a": "1.5", "b": "2.0"}, None, 0),
        ({"a": "2.5", "b": "2.0"}, 9, 0),
        ({"a": "1.5"}, 9, 0),
        ({"a": "1.5", "b": "2.0", "c": "1"}, 9, 0),
        ({"a": "mine", "b": "2.0"}, 9, 0),
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


def test_the_table_names_distributions_and_says_what_to_do() -> None:
    for entry in TABLE:
        assert entry.problem
        assert entry.instead.startswith(("install", "train"))
    assert _known_bad.installed_version("torch") == metadata.version("torch")
    assert _known_bad.installed_version("no-such-package") is None


def test_the_first_argument_of_a_decorated_layer_is_found_by_its_name() -> None:
    """transformers 5.15 decorates Bamba's forward without keeping its signature."""

    class Plain:
        def forward(self, x: Tensor, cache: object = None) -> None: ...

    class Hidden:
        def forward(self, *args: object, **kwargs: object) -> None: ...

    assert mixers._tokens_name(Plain.forward) == "x"
    assert mixers._tokens_name(Hidden.forward) == "hidden_states"
