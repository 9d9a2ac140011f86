"""FP8 on a CUDA device, in every recipe that the device and the installed engines have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd._imports import available
from lightning_thd._static import static_shapes
from lightning_thd.callbacks.cuda_graph import GraphedStep, make_buckets
from lightning_thd.precision import FP8Precision, convert_linear, fp8_context
from lightning_thd.precision.convert import recipe_of
from tests.cuda_graph.support import gradients, pad_batch, worst
from tests.device_reads import ON_GPU
from tests.precision.runs import Module, fit, llama

pytestmark = ON_GPU
RECIPES = [
    *(("te", name) for name in ("delayed", "current", "blockwise", "mxfp8", "nvfp4")),
    *(("torchao", name) for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")),
]
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_key_value_heads": 4, "num_attention_heads": 8}


def converted(engine: str, recipe: str) -> Any:
    """A model on the device in a recipe, or a skip that says why there is none."""
    package = {"te": "transformer_engine.pytorch", "torchao": "torchao.float8"}[engine]
    if not available(package):
        pytest.skip(f"{package} is not installed")
    model = llama(**WIDE).to("cuda", torch.bfloat16)
    try:
        convert_linear(model, recipe=recipe, engine=engine)
    except MisconfigurationException as missing:
        pytest.skip(str(missing))
    return model


def packs(model: Any, count: int) -> list[THDBatch]:
    recipe = recipe_of(model)
    assert recipe is not None
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(count):
        lengths = rng.integers(1, 700, rng.integers(1, 12))
        samples = [{"input_ids": rng.integers(0, 260, length).tolist()} for length in lengths]
        batches.append(THDBatch.collate(samples, align=recipe.alignment()).to("cuda"))
    return batches


@pytest.mark.parametrize(("engine", "recipe"), RECIPES)
def test_two_hundred_random_aligned_packs_run_forward_and_backward(engine: str, recipe: str) -> None:
    model = converted(engine, recipe)
    for batch in packs(model, 200):
        with fp8_context(model):
            loss = causal_lm_loss(model, batch)
        loss.backward()
        assert torch.isfinite(loss.detach())
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "recipe"), RECIPES)
def test_the_loss_after_200_steps_is_within_one_percent_of_bf16(
    tmp_path: Path, engine: str, recipe: str
) -> None:
    converted(engine, recipe)  # or skip
    settings: dict[str, Any] = {"steps": 200, "accelerator": "gpu"}
    plain = Module(llama(**WIDE))
    low = Module(llama(**WIDE))
    fit(tmp_path, plain, None, precision="bf16-true", **settings)
    fit(tmp_path, low, FP8Precision(recipe, engine=engine), **settings)
    assert np.mean(low.losses[-50:]) == pytest.approx(np.mean(plain.losses[-50:]), rel=0.01)


@pytest.mark.parametrize(("engine", "recipe"), [("te", "current"), ("torchao", "tensorwise")])
def test_a_captured_step_equals_an_eager_one(engine: str, recipe: str) -> None:
    """Scales are made of the numbers at hand, and again in a replay; flash attention adds in any order."""
    model = converted(engine, recipe)

    def loss_of(module: Any, batch: THDBatch) -> torch.Tensor:
        with fp8_context(module):
            return causal_lm_loss(module, batch)

    buckets = make_buckets((12,), slots=8192)
    step = GraphedStep(loss_of, model, buckets=buckets, require=True)
    for batch in packs(model, 4):
        with static_shapes():  # on the very slots of the graph, whose padding takes part in every scale
            eager = loss_of(model, pad_batch(batch, buckets[0]))
        expected = gradients(model, eager)
        replayed = step(batch)
        actual = gradients(model, replayed)
        assert torch.equal(replayed.detach(), eager.detach())
        assert worst(actual, expected) < 2e-2
    assert step.stats.replays == 4
