"""Layers that Liger patches, run for real on packs: losses and gradients are those of unpatched layers."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from lightning_thd import causal_lm_loss
from lightning_thd._imports import installed
from tests.cuda_graph.support import gradients, random_batch, worst
from tests.models.families import build

if not installed("liger_kernel"):
    pytest.skip("liger-kernel is not installed", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, on masked lanes that hold anything
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"),  # the interpreter's own numpy
]
TOLERANCE = 1e-5  # fp32: Liger keeps its own order of sums
_REPLACED = ("apply_rotary_pos_emb", "{}RMSNorm", "{}MLP")  # what Liger replaces in the module of a family


@pytest.fixture(autouse=True)
def _as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the interpreter what the compiler has: floats that are scalars of Triton, and CUDA's rsqrt."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    convert: Callable[[Any], Any] = interpreter._implicit_cvt

    def convert_floats(value: Any) -> Any:
        if type(value) is not float:
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert_floats)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: 1.0 / tl.sqrt(x))


def patched(name: str, plain: Any, monkeypatch: pytest.MonkeyPatch, *, built: bool) -> Any:
    """Return a copy of a model that Liger patches: the model itself if ``built``, else its classes before."""
    from liger_kernel import transformers as liger

    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    for pattern in _REPLACED:
        attribute = pattern.format(name.title())
        monkeypatch.setattr(modeling, attribute, getattr(modeling, attribute))  # given back after the test
    apply: Callable[..., None] = getattr(liger, f"apply_liger_kernel_to_{name}")
    without_loss: Any = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    if built:
        model = copy.deepcopy(plain)
        apply(model=model, **without_loss)
        return model
    apply(**without_loss)
    model = build(name, "thd").train()
    model.load_state_dict(plain.state_dict())
    return model


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_layers_patched_by_liger_are_exact_on_packs(
    name: str, built: bool, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    plain = build(name, "thd").train()
    expected = []
    batches = [random_batch(seed, count=3, longest=8) for seed in (1, 2)]
    for batch in batches:
        loss = causal_lm_loss(plain, batch)
        expected.append((float(loss.detach()), [x.clone() for x in gradients(plain, loss)]))
    model = patched(name, plain, monkeypatch, built=built)
    assert "Liger" in model.model.norm._get_name()
    for batch, (value, of_plain) in zip(batches, expected, strict=True):
        loss = causal_lm_loss(model, batch)
        assert float(loss.detach()) == pytest.approx(value, rel=TOLERANCE)
        error = worst(gradients(model, loss), of_plain)
        assert error < TOLERANCE
    record_property(f"Liger's layers, {name}, {'an instance' if built else 'classes'}", error)


@pytest.mark.parametrize("built", [True, False])
def test_the_loss_of_packs_takes_the_place_of_ligers(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's default patches the forward pass of the whole model, whose loss packs never call."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    from transformers.models.qwen3 import modeling_qwen3

    plain = build("qwen3", "thd").train()
    batch = random_batch(1, count=3)
    expected = causal_lm_loss(plain, batch)
    of_plain = [x.clone() for x in gradients(plain, expected)]
    whole: Any = modeling_qwen3.Qwen3ForCausalLM
    monkeypatch.setattr(whole, "forward", whole.forward)
    layers = {"rope": False, "rms_norm": False, "swiglu": False}
    if built:
        model = copy.deepcopy(plain)
        apply_liger_kernel_to_qwen3(model=model, **layers)
    else:
        apply_liger_kernel_to_qwen3(**layers)
        model = build("qwen3", "thd").train()
        model.load_state_dict(plain.state_dict())
    loss = causal_lm_loss(model, batch)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert worst(gradients(model, loss), of_plain) < TOLERANCE
