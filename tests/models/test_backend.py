"""``prepare(model, backend=...)``: all layers run the kernel that the user chose, with the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_thd import Sequences, THDBatch, causal_lm_loss
from lightning_thd.attention import entry
from lightning_thd.models import prepare
from tests.device_reads import ON_GPU
from tests.integrations.support import make_loop, run
from tests.models.families import build_in_double
from tests.ranks import run_ranks
from tests.tiny import sequences, tiny_llama

BATCH = THDBatch.collate(sequences(9, labels=True))


@contextmanager
def recorded_choices() -> Iterator[list[str]]:
    """Record the kernels that calls of attention choose."""
    kernels: list[str] = []
    choose = entry.choose

    def recording(*args: Any) -> str:
        kernels.append(choose(*args))
        return kernels[-1]

    with mock.patch.object(entry, "choose", recording):
        yield kernels


def trained(model: nn.Module, batch: THDBatch = BATCH) -> tuple[torch.Tensor, list[str]]:
    """Return the loss, the gradients in one tensor, and the kernels of one step on new boundaries."""
    model.zero_grad()
    batch = copy.copy(batch).to("cpu")
    batch.boundaries.kernels.clear()
    with recorded_choices() as kernels:
        loss = causal_lm_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([loss.detach()[None], *gradients]), kernels


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bamba"])
@pytest.mark.filterwarnings("ignore:.*RoPE scaling factor")
def test_all_layers_run_the_chosen_kernel(family: str) -> None:
    model = build_in_double(family)
    expected, kernels = trained(model)
    assert set(kernels) <= {"cpu"}

    assert prepare(model, backend="portable") is model
    result, chosen = trained(model)
    assert chosen == ["portable"] * len(kernels)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)


# torch.compile looks at .grad of the tensors a graph starts with; after a graph break those are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
# torch instantiates the class itself while it traces an autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_runs_the_chosen_kernel() -> None:
    model = tiny_llama()
    expected, _ = trained(model)
    prepare(model, backend="portable")
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager")
    with recorded_choices() as kernels:
        loss = causal_lm_loss(compiled, BATCH)
    assert set(kernels) == {"portable"}
    torch.testing.assert_close(loss.detach(), expected[0], rtol=1e-9, atol=0)


def test_shared_prefixes_run_the_chosen_kernel() -> None:
    prompt = list(range(3, 12))
    samples = [{"input_ids": [*prompt, 20 + i, 21 + i], "labels": [-100] * 9 + [20, 21]} for i in range(3)]
    batch = THDBatch.collate(samples, share_prefixes=True)
    model = tiny_llama()
    expected, _ = trained(model, batch)

    prepare(model, backend="portable")
    result, kernels = trained(model, batch)
    assert set(kernels) == {"portable"}
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)


def _kernels_of_a_shared_pack() -> set[str]:
    model = prepare(tiny_llama(), backend="portable")
    _, loop = make_loop("accelerate", Sequences(12), model=model, context_parallel_size=2)
    with recorded_choices() as kernels:
        run(loop, 1)
    return set(kernels)


def test_ranks_that_share_packs_run_the_chosen_kernel() -> None:
    assert run_ranks(_kernels_of_a_shared_pack, 2) == [{"portable"}] * 2


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=ON_GPU) for name in ("torch", "efficient", "portable")]
)
def test_a_gpu_runs_the_chosen_kernel(backend: Any) -> None:
    model = tiny_llama(torch.float32)
    expected, _ = trained(model)
    model.bfloat16().cuda()
    prepare(model, backend=backend)
    with recorded_choices() as kernels:
        loss = causal_lm_loss(model, BATCH.to("cuda"))
        loss.backward()  # type: ignore[no-untyped-call]
    assert set(kernels) == {backend}
    assert float(loss.detach()) == pytest.approx(float(expected[0]), rel=0.02)  # bf16 rounds by 2^-8


def test_later_calls_and_copies_keep_the_choice_until_auto() -> None:
    model = tiny_llama()
    prepare(model, backend="portable")
    prepare(model)
    assert trained(copy.deepcopy(model))[1] == ["portable"]

    layers: Any = model.model.layers  # type: ignore[union-attr]
    layers[1] = copy.deepcopy(tiny_llama().model.layers[1])  # type: ignore[union-attr, index]
    prepare(model)
    assert set(trained(model)[1]) == {"portable"}

    prepare(model, backend="auto")
    assert set(trained(model)[1]) == {"cpu"}


def test_a_call_that_the_chosen_kernel_cannot_run_raises() -> None:
    model = tiny_llama()
    prepare(model, backend="torch")
    with pytest.raises(ValueError, match=r"(?s)backend='torch' cannot run this call.*runs on cuda tensors"):
        trained(model)


def test_a_choice_that_is_none_raises() -> None:
    wrong: Any = "flash2"
    with pytest.raises(ValueError, match=r"backend='flash2' is not known; choose one of auto, cpu, torch"):
        prepare(tiny_llama(), backend=wrong)
    with pytest.raises(ValueError, match=r"backend='torch' is for models of transformers, but Linear"):
        prepare(nn.Linear(2, 2), backend="torch")
