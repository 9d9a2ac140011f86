"""FP8 under the recorder of graphs: a replay scales the numbers at hand anew, bit for bit as eager does."""

from __future__ import annotations

import pytest
import torch

from lightning_thd.callbacks.cuda_graph import CaptureError
from lightning_thd.cuda_graph.buckets import choose
from lightning_thd.precision import convert_linear
from lightning_thd.precision.recipes import _KNOWN
from tests.cuda_graph.support import BUCKETS, gradients, graphed, padded_eager, random_batch
from tests.precision.runs import llama

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao", "ignore::UserWarning:torchao")


@pytest.mark.parametrize(
    "recipe",
    [
        "tensorwise",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("rowwise", "rowwise_with_gw_hp")),
    ],
)
def test_a_captured_step_equals_an_eager_one_bit_for_bit(recipe: str) -> None:
    model = llama()
    convert_linear(model, recipe=recipe, engine="torchao", emulate=True)
    step = graphed(model)
    for seed in range(6):
        batch = random_batch(seed)
        bucket, _ = choose(BUCKETS, batch)
        if bucket is None:
            continue
        assert bucket.slots % 16 == 0
        loss = step(batch)
        found = gradients(model, loss)
        eager = padded_eager(model, batch, bucket)
        assert torch.equal(loss.detach(), eager.detach())
        assert all(torch.equal(a, b) for a, b in zip(found, gradients(model, eager), strict=True))
        with torch.no_grad():  # so that the next replay finds other numbers, of another size, to scale
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert step.stats.replays >= 3


def test_a_recipe_with_a_history_is_refused() -> None:
    model = llama()
    convert_linear(model, recipe="tensorwise", engine="torchao", emulate=True)
    layer = model.model.layers[0].mlp.up_proj
    layer.__dict__["_thd_fp8"] = _KNOWN["te", "delayed"]
    model.__dict__["_thd_fp8"] = _KNOWN["te", "delayed"]
    with pytest.raises(CaptureError, match="follow a history"):
        graphed(model)(random_batch(0))
