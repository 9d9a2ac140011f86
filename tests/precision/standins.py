"""A double of Transformer Engine that accepts what the real one accepts, and asserts what it asserts.

Signatures and assertions are those of versions 2.4 (``fp8_autocast``) to 2.20 (``autocast``): Linear's
arguments, ``assert_dim_for_fp8_exec`` in the forward pass, the rows of the weight gradient by recipe, the
feature blocks of the quantizers, and one call of a module in a region whose statistics are reduced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

ROWS = {
    "DelayedScaling": 16,
    "Float8CurrentScaling": 16,
    "Float8BlockScaling": 128,
    "MXFP8BlockScaling": 32,
    "NVFP4BlockScaling": 16,
}
BLOCKS = {
    "DelayedScaling": 16,
    "Float8CurrentScaling": 16,
    "Float8BlockScaling": 128,
    "MXFP8BlockScaling": 32,
    "NVFP4BlockScaling": 16,
}


@dataclass
class State:
    """What the double saw.

    Attributes:
        regions: entered, each as (recipe class, group, gradients were taken).
        calls: of layers outside and inside of regions, True for inside.
        rows: of every fp8 forward product.
    """

    regions: list[tuple[str, Any, bool]] = field(default_factory=list)
    calls: list[bool] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
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


def install(monkeypatch: Any, *, new_name: bool = True) -> State:
    """Put the double where imports look.

    Args:
        monkeypatch: of pytest.
        new_name: ``te.autocast`` (2.20) in place of ``te.fp8_autocast`` (2.4).
    """
    state = State()
    te, common, recipes = (
        ModuleType(f"transformer_engine.{name}") for name in ("pytorch", "common", "common.recipe")
    )
    root = ModuleType("transformer_engine")

    class Recipe:
        pass

    recipes.Recipe = Recipe  # type: ignore[attr-defined]
    for name in (*ROWS, "CustomRecipe"):
        cls = type(name, (Recipe,), {"__module__": recipes.__name__})
        setattr(recipes, name, cls)

    class TransformerEngineBaseModule(nn.Module):
        __module__ = "transformer_engine.pytorch.module.base"

    class Linear(TransformerEngineBaseModule):
        __module__ = "transformer_engine.pytorch.module.linear"

        def __init__(
            self,
            in_features: int,
            out_features: int,
            sequence_parallel: bool = False,
            fuse_wgrad_accumulation: bool = False,
            tp_group: Any = None,
            tp_size: int = 1,
            get_rng_state_tracker: Any = None,
            init_method: Any = None,
            bias: bool = True,
            return_bias: bool = False,
            params_dtype: torch.dtype | None = None,
            parallel_mode: str | None = None,
            parameters_split: Any = None,
            device: torch.device | str = "cuda",
            ub_overlap_ag: bool = False,
        ) -> None:
            super().__init__()
            assert torch.device(device).type == "meta", "memory would be taken twice"
            assert params_dtype in (torch.bfloat16, torch.float32)
            self.in_features, self.out_features = in_features, out_features
            self.weight = nn.Parameter(
                torch.empty(out_features, in_features, device=device, dtype=params_dtype)
            )
            if bias:
                self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=params_dtype))
            else:
                self.bias = torch.Tensor()  # type: ignore[assignment]

        def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
            state.calls.append(state.recipe is not None)
            weight = self.weight.to(inp.dtype)
            if state.recipe is None:
                out = inp @ weight.t()
            else:
                kind = type(state.recipe).__name__
                for tensor in (inp, weight):
                    shape = list(tensor.shape)
                    assert prod(shape[:-1]) % 8 == 0, f"FP8 execution: rows divisible by 8, got {shape}"
                    assert shape[-1] % 16 == 0, f"FP8 execution: columns divisible by 16, got {shape}"
                for size in (self.in_features, self.out_features):
                    assert size % BLOCKS.get(kind, 16) == 0, f"{size} features in blocks of {BLOCKS[kind]}"
                if kind == "DelayedScaling":
                    assert id(self) not in state.called, "a module twice in a region that reduces statistics"
                    state.called.add(id(self))
                state.rows.append(prod(inp.shape[:-1]))
                out = _Product.apply(inp, weight, ROWS.get(kind, 16))
            return out + self.bias.to(out.dtype) if self.bias.numel() else out

    @contextmanager
    def region(enabled: bool, recipe: Any, group: Any) -> Iterator[None]:
        before, called = state.recipe, state.called
        state.regions.append((type(recipe).__name__, group, torch.is_grad_enabled()))
        state.recipe, state.called = (recipe if enabled else None), set()
        try:
            yield
        finally:
            state.recipe, state.called = before, called

    def autocast(
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Any = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> Any:
        return region(enabled, recipe, amax_reduction_group)

    def fp8_autocast(
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Any = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> Any:
        return region(enabled, fp8_recipe, fp8_group)

    te.Linear = Linear  # type: ignore[attr-defined]
    if new_name:
        te.autocast = autocast  # type: ignore[attr-defined]
    else:
        te.fp8_autocast = fp8_autocast  # type: ignore[attr-defined]
    root.pytorch, root.common, common.recipe = te, common, recipes  # type: ignore[attr-defined]
    for module in (root, te, common, recipes):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return state
