"""Every loss, and every family in fp32, on a CUDA device: the CPU's numbers, and no waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._triton import has_triton

from lightning_thd import causal_lm_loss
from lightning_thd.models import register_thd
from tests.device_reads import ON_GPU, no_waiting
from tests.loss.cases import cases, run
from tests.models import matrix
from tests.models.families import FAMILIES
from tests.models.matrix import thd_model

pytestmark = ON_GPU
RELATIVE = 2e-4
ABSOLUTE = 1e-6
register_thd()


@pytest.mark.parametrize(("make", "loss", "given"), [pytest.param(*rest, id=name) for name, *rest in cases()])
def test_loss(make: Callable[[], Any], loss: Callable[[Any, Any], Tensor], given: Any) -> None:
    here = make()
    there = make().cuda()
    expected, gradients = run(here, loss, given)
    moved = given.to("cuda")
    run(there, loss, moved)
    again = given.to("cuda")
    torch.cuda.synchronize()
    with no_waiting():
        value, actual = run(there, loss, again)
    torch.testing.assert_close(value.cpu(), expected, rtol=RELATIVE, atol=ABSOLUTE)
    assert actual.keys() == gradients.keys()
    for name, gradient in gradients.items():
        near = {"rtol": RELATIVE, "atol": ABSOLUTE + RELATIVE * float(gradient.abs().max())}
        torch.testing.assert_close(actual[name].cpu(), gradient, **near)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_model(backend: str, dtype: torch.dtype) -> None:
    if backend == "inductor" and not has_triton():
        pytest.skip("triton is not installed")
    torch._dynamo.reset()
    counters.clear()
    model = thd_model("qwen3").to("cuda", dtype).train()

    for batch in (pack.to("cuda") for pack in matrix.packs() * 2):
        runs = []
        for way in (model, torch.compile(model, backend=backend)):
            model.zero_grad()
            loss = causal_lm_loss(way, batch)
            loss.backward()
            runs.append([loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)])
        errors = [float((a - b).norm() / a.norm()) for a, b in zip(*runs, strict=True)]
        assert max(errors) < (1e-5 if dtype is torch.float32 else 3e-2)

    assert all("_outside_compile" in place for place in counters["graph_break"])  # the head, by design


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str) -> None:
    model = thd_model(name).eval().to("cuda")
    logits = []
    targets = []
    for batch in (pack.to("cuda") for pack in matrix.packs()):
        logits += batch.unpack(model(**batch.hf_kwargs()).logits.float())
        targets += batch.unpack(batch.targets)
    result = matrix.result_of(model, logits, targets)
    gradients = {key: value.cpu() for key, value in result.gradients.items()}
    here = matrix.Result([x.cpu() for x in result.logits], result.loss.cpu(), gradients)
    matrix.assert_same(here, matrix.oracle(name)[1], tolerance=1e-5)
