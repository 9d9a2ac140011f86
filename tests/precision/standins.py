"""A double of Transformer Engine that takes what a version of it takes, and asserts what it asserts.

Names of arguments and classes are those of every release from 2.4 to 2.20, read in its repository; so are
the assertions: rows and columns of an fp8 input in the forward pass, rows of the weight gradient by recipe,
the feature blocks of the quantizers, and one call of a module in a region whose statistics are reduced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
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


VERSIONS = tuple(f"2.{minor}" for minor in range(4, 21))
_LINEAR = (
    *("in_features", "out_features", "sequence_parallel", "fuse_wgrad_accumulation", "tp_group", "tp_size"),
    *("get_rng_state_tracker", "rng_tracker_name", "init_method", "bias", "return_bias", "params_dtype"),
    *("parallel_mode", "parameters_split", "device", "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad"),
    *("ub_bulk_dgrad", "ub_bulk_wgrad", "ub_name", "delay_wgrad_compute", "symmetric_ar_type", "name"),
)
_FORWARD = ("inp", "is_first_microbatch", "fp8_output", "fp8_grad")
_REGION = ("enabled", "calibrating", "recipe", "amax_reduction_group", "_graph")
_OLDER_REGION = ("enabled", "calibrating", "fp8_recipe", "fp8_group", "_graph")
# what came later than 2.4
_SINCE = {
    "save_original_input": 6,
    "NVFP4BlockScaling": 8,
    "CustomRecipe": 9,
    "autocast": 9,
    "ValueError": 14,
}


def _bound(names: tuple[str, ...], args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Bind a call to the arguments of a version, as Python does."""
    if len(args) > len(names):
        raise TypeError(f"{len(args)} positional arguments where {len(names)} are taken")
    found = dict(zip(names, args, strict=False))
    for name, value in given.items():
        if name not in names:
            raise TypeError(f"an unexpected keyword argument {name!r}")
        if name in found:
            raise TypeError(f"multiple values for {name!r}")
        found[name] = value
    return found


@dataclass
class State:
    """What the double saw.

    Attributes:
        regions: entered, each as (recipe class, group, gradients were taken).
        calls: of layers outside and inside of regions, True for inside.
        rows: of every fp8 forward product.
        outside: for every region whether bf16 autocast was on around it.
        names: of the functions that entered regions.
    """

    regions: list[tuple[str, Any, bool]] = field(default_factory=list)
    calls: list[bool] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    outside: list[bool] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
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


def install(monkeypatch: Any, *, version: str = VERSIONS[-1]) -> State:
    """Put the double where imports look.

    Args:
        monkeypatch: of pytest.
        version: of Transformer Engine, from "2.4" to "2.20".
    """
    state = State()
    minor = int(version.partition(".")[2])

    def has(name: str) -> bool:
        return minor >= _SINCE.get(name, 0)

    linear = tuple(name for name in (*_LINEAR[:-1], "save_original_input", "name") if has(name))
    refusal = ValueError if has("ValueError") else AssertionError

    def demand(holds: bool, what: str) -> None:
        if not holds:
            raise refusal(what)

    te, common, recipes = (
        ModuleType(f"transformer_engine.{name}") for name in ("pytorch", "common", "common.recipe")
    )
    root = ModuleType("transformer_engine")

    class Recipe:
        pass

    recipes.Recipe = Recipe  # type: ignore[attr-defined]
    for name in filter(has, (*ROWS, "CustomRecipe")):
        cls = type(name, (Recipe,), {"__module__": recipes.__name__})
        setattr(recipes, name, cls)

    class TransformerEngineBaseModule(nn.Module):
        __module__ = "transformer_engine.pytorch.module.base"

    class Linear(TransformerEngineBaseModule):
        __module__ = "transformer_engine.pytorch.module.linear"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            given = _bound(linear, args, kwargs)
            device, dtype = given.get("device", "cuda"), given.get("params_dtype")
            assert torch.device(device).type == "meta", "memory would be taken twice"
            assert dtype in (torch.bfloat16, torch.float32)
            self.in_features, self.out_features = given["in_features"], given["out_features"]
            sizes = self.out_features, self.in_features
            self.weight = nn.Parameter(torch.empty(sizes, device=device, dtype=dtype))
            if given.get("bias", True):
                self.bias = nn.Parameter(torch.empty(sizes[:1], device=device, dtype=dtype))
            else:
                self.bias = torch.Tensor()  # type: ignore[assignment]

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            inp: Tensor = _bound(_FORWARD, args, kwargs)["inp"]
            state.calls.append(state.recipe is not None)
            weight = self.weight.to(inp.dtype)
            if state.recipe is None:
                out = inp @ weight.t()
            else:
                kind = type(state.recipe).__name__
                for tensor in (inp, weight):
                    shape = list(tensor.shape)
                    demand(prod(shape[:-1]) % 8 == 0, f"FP8 execution: rows divisible by 8, got {shape}")
                    demand(shape[-1] % 16 == 0, f"FP8 execution: columns divisible by 16, got {shape}")
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
        state.outside.append(torch.is_autocast_enabled("cpu"))
        state.regions.append((type(recipe).__name__, group, torch.is_grad_enabled()))
        state.recipe, state.called = (recipe if enabled else None), set()
        try:
            yield
        finally:
            state.recipe, state.called = before, called

    def autocast(*args: Any, **kwargs: Any) -> Any:
        given = _bound(_REGION, args, kwargs)
        state.names.add("autocast")
        return region(given.get("enabled", True), given.get("recipe"), given.get("amax_reduction_group"))

    def fp8_autocast(*args: Any, **kwargs: Any) -> Any:
        given = _bound(_OLDER_REGION, args, kwargs)
        state.names.add("fp8_autocast")
        return region(given.get("enabled", True), given.get("fp8_recipe"), given.get("fp8_group"))

    te.Linear, te.fp8_autocast = Linear, fp8_autocast  # type: ignore[attr-defined]
    if has("autocast"):
        te.autocast = autocast  # type: ignore[attr-defined]
    root.pytorch, root.common, common.recipe = te, common, recipes  # type: ignore[attr-defined]
    for module in (root, te, common, recipes):
        module.__spec__ = ModuleSpec(module.__name__, None)  # for those who only ask whether it is there
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return state
