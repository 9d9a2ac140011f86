"""A double of Transformer Engine that takes what its releases from 2.9 on take, and asserts what they assert.

Names of arguments and classes, and the assertions, are read in its repository: rows and columns of an fp8
input in the forward pass, rows of the weight gradient by recipe, the feature blocks of the quantizers, and
one call of a module in a region whose statistics are reduced.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

# rows of a weight gradient, and blocks of features, of every recipe
ROWS = {
    "DelayedScaling": 16,
    "Float8CurrentScaling": 16,
    "Float8BlockScaling": 128,
    "MXFP8BlockScaling": 32,
    "NVFP4BlockScaling": 16,
}


@dataclass
class State:
    """What the double saw."""

    regions: list[tuple[str, Any, bool]] = field(default_factory=list)
    calls: list[bool] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    outside: list[bool] = field(default_factory=list)
    recipe: Any = None
    called: set[int] = field(default_factory=set)


class _Product(torch.autograd.Function):
    """x @ w.T whose backward asserts the rows of the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, multiple: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.multiple = multiple
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rows = prod(x.shape[:-1])
        assert rows % ctx.multiple == 0, f"{rows} rows of a weight gradient, no multiple of {ctx.multiple}"
        return grad @ weight, grad.reshape(rows, -1).t() @ x.reshape(rows, -1), None


def install(monkeypatch: Any) -> State:
    """Put the double where imports look."""
    state = State()
    te, common, recipes = (
        ModuleType(f"transformer_engine.{name}") for name in ("pytorch", "common", "common.recipe")
    )
    root = ModuleType("transformer_engine")
    for name in (*ROWS, "CustomRecipe"):
        setattr(recipes, name, type(name, (), {"__module__": recipes.__name__}))

    class Linear(nn.Module):
        __module__ = "transformer_engine.pytorch.module.linear"

        def __init__(
            self, in_features: int, out_features: int, *, bias: bool, params_dtype: torch.dtype, device: str
        ) -> None:
            super().__init__()
            assert torch.device(device).type == "meta", "memory would be taken twice"
            assert params_dtype in (torch.bfloat16, torch.float32)
            self.in_features = in_features
            self.out_features = out_features
            like = {"device": device, "dtype": params_dtype}
            self.weight = nn.Parameter(torch.empty(out_features, in_features, **like))  # type: ignore[arg-type]
            self.bias: Any = torch.Tensor()
            if bias:
                del self.bias
                self.bias = nn.Parameter(torch.empty(out_features, **like))  # type: ignore[arg-type]
            self.fp8_meta: dict[str, Any] = {}

        def get_extra_state(self) -> Tensor:
            if "scaling_fwd" not in self.fp8_meta:
                return torch.empty(0, dtype=torch.uint8)
            return torch.frombuffer(bytearray(pickle.dumps(self.get_fp8_meta_tensors())), dtype=torch.uint8)

        def set_extra_state(self, state: Tensor) -> None:
            if state.numel():
                raise RuntimeError("Refusing to load pickled Transformer Engine extra state for Linear.")

        def init_fp8_meta_tensors(self, recipe: Any) -> None:
            assert type(recipe).__name__ == "DelayedScaling", "no other recipe has statistics"
            gemms = self.fp8_meta["num_gemms"]
            for key, tensors in (("scaling_fwd", 3 * gemms), ("scaling_bwd", 2 * gemms)):
                history = torch.zeros(1024, tensors, dtype=torch.float32)
                made = SimpleNamespace(scale=torch.ones_like(history[0]), amax_history=history)
                self.fp8_meta.setdefault(key, made)

        def get_fp8_meta_tensors(self) -> dict[str, list[Tensor]] | None:
            if "scaling_fwd" not in self.fp8_meta:
                return None
            states = {key: self.fp8_meta[key] for key in ("scaling_fwd", "scaling_bwd")}
            return {key: [s.scale.clone(), s.amax_history.clone()] for key, s in states.items()}

        def reset_fp8_meta_tensors(self, fp8_meta_tensors: dict[str, list[Tensor]]) -> None:
            for key in ("scaling_fwd", "scaling_bwd"):
                self.fp8_meta[key].scale.copy_(fp8_meta_tensors[key][0])
                self.fp8_meta[key].amax_history.copy_(fp8_meta_tensors[key][1])

        def forward(self, inp: Tensor) -> Tensor:
            state.calls.append(state.recipe is not None)
            weight = self.weight.to(inp.dtype)
            if state.recipe is None:
                out = inp @ weight.t()
            else:
                kind = type(state.recipe).__name__
                for tensor in (inp, weight):
                    shape = list(tensor.shape)
                    if prod(shape[:-1]) % 8 or shape[-1] % 16:
                        raise ValueError(f"FP8 execution: rows divisible by 8, columns by 16, got {shape}")
                for size in (self.in_features, self.out_features):
                    assert size % ROWS[kind] == 0, f"{size} features in blocks of {ROWS[kind]}"
                if kind == "DelayedScaling":
                    assert id(self) not in state.called, "a module twice in a region that reduces statistics"
                    state.called.add(id(self))
                    self.fp8_meta["num_gemms"] = 1
                    self.init_fp8_meta_tensors(state.recipe)
                    if torch.is_grad_enabled():
                        history = self.fp8_meta["scaling_fwd"].amax_history
                        history.copy_(history.roll(1, 0))[0, 0] = inp.detach().abs().max()
                state.rows.append(prod(inp.shape[:-1]))
                out = _Product.apply(inp, weight, ROWS[kind])
            return out + self.bias.to(out.dtype) if self.bias.numel() else out

    @contextmanager
    def autocast(*, enabled: bool, recipe: Any, amax_reduction_group: Any) -> Iterator[None]:
        before = state.recipe
        called = state.called
        state.outside.append(torch.is_autocast_enabled("cpu"))
        state.regions.append((type(recipe).__name__, amax_reduction_group, torch.is_grad_enabled()))
        state.recipe = recipe if enabled else None
        state.called = set()
        try:
            yield
        finally:
            state.recipe = before
            state.called = called

    te.Linear = Linear  # type: ignore[attr-defined]
    te.autocast = autocast
    root.pytorch = te  # type: ignore[attr-defined]
    root.common = common
    common.recipe = recipes
    for module in (root, te, common, recipes):
        module.__spec__ = ModuleSpec(module.__name__, None)  # for those who only ask whether it is there
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return state
