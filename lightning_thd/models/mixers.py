"""State-space, linear-attention and short-convolution layers -> the same layers, reset at boundaries.

transformers runs them over the whole row, so that state and convolution cross from one sequence into the
next. Here the forward of their class is replaced once: outside a pack it does what it did; inside, it passes
seq_idx and cu_seqlens to the fused kernels where those are installed, and runs on padded groups of sequences
where not.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_thd._static import shapes_are_static
from lightning_thd.models.fused_kernels import boundaries, can_run
from lightning_thd.models.pack import Pack, current_pack, current_scope
from lightning_thd.models.padded_groups import plan_groups, plan_static_group, run_grouped
from lightning_thd.models.passing.adopt import adopt_functions, run_on_shard
from lightning_thd.models.whole_pack import run_on_pack
from lightning_thd.parallel.context import layout

# What must be installed for the layer's own kernels to keep sequences apart; None where they cannot.
_SSD: Final = ("mamba_ssm", "causal_conv1d")
_DELTA: Final = ("fla", "causal_conv1d")
_CONV: Final = ("causal_conv1d",)
MIXERS: Final[dict[str, tuple[str, ...] | None]] = {
    "MambaMixer": None,
    "FalconMambaMixer": None,
    "JambaMambaMixer": None,
    "ZambaMambaMixer": None,
    "Mamba2Mixer": _SSD,
    "BambaMixer": _SSD,
    "GraniteMoeHybridMambaLayer": _SSD,
    "FalconH1Mixer": _SSD,
    "NemotronHMamba2Mixer": _SSD,
    "Zamba2MambaMixer": _SSD,
    "Qwen3NextGatedDeltaNet": _DELTA,
    "Qwen3_5GatedDeltaNet": _DELTA,
    "Qwen3_5MoeGatedDeltaNet": _DELTA,
    "Qwen4ExpTextGatedDeltaNet": None,
    "OlmoHybridGatedDeltaNet": _DELTA,
    "KimiLinearDeltaAttention": _DELTA,
    "BailingHybridDeltaAttention": _DELTA,
    "Lfm2ShortConv": _CONV,
    "Lfm2MoeShortConv": _CONV,
    "Lfm3ShortConv": _CONV,
    "RecurrentGemmaRecurrentBlock": None,
    "MiniMaxLightningAttention": None,
    "RwkvSelfAttention": None,
    "RwkvFeedForward": None,
    "xLSTMLayer": None,
    "ZayaCCAProjection": None,
    "InklingShortConvolution": None,
    "Inkling2ShortConvolution": None,
}
# Layers that return several values a token: queries, keys and values.
_SEVERAL: Final = frozenset({"ZayaCCAProjection"})
_CACHES = ("cache_params", "past_key_values", "past_key_value", "state")
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def adopt_mixers(model_class: type) -> None:
    """Patch the state-space, linear-attention and convolution layers of a model class to handle packs."""
    for base in model_class.__mro__:
        module = sys.modules.get(base.__module__)
        for name, kernels in MIXERS.items():
            cls: Any = getattr(module, name, None)
            if cls is not None and not hasattr(cls.forward, "_thd_mixer"):
                carried = adopt_functions(cls)
                cls.forward = _pack_aware(cls.forward, kernels, carried, several=name in _SEVERAL)


def has_mixers(model: nn.Module) -> bool:
    """Return whether any layer of the model carries a state along the row."""
    return any(hasattr(type(module).forward, "_thd_mixer") for module in model.modules())


def _pack_aware(
    forward: Callable[..., Any], kernels: tuple[str, ...] | None, carried: frozenset[str], *, several: bool
) -> Callable[..., Any]:
    tokens_name = _tokens_name(forward)

    @functools.wraps(forward)
    def pack_aware_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        pack = current_pack()
        scope = current_scope()
        # Only for models that announced the pack: whether a stock model leaks must not depend on whether
        # another model of its family was built with "thd" in this process.
        if pack is None or scope is None or scope.module is None:
            return forward(self, *args, **kwargs)
        tokens = args[0] if args else kwargs[tokens_name]
        kwargs = {name: value for name, value in kwargs.items() if name not in _BOUNDARIES}
        _refuse(self, tokens, pack, kwargs)
        shard = layout.layout_of(pack.cu_seqlens_q) if layout.in_use else None
        if shard is not None and carried and shard.layout != "striped" and not shard.fixed:
            return run_on_shard(functools.partial(forward, self), args, kwargs, shard, carried)
        if shard is not None:
            return run_on_pack(functools.partial(pack_aware_forward, self), args, kwargs, shard)
        if kernels is not None and can_run(kernels, tokens):
            return forward(self, *args, **kwargs, **boundaries(kernels, pack, type(self)))
        return _grouped(functools.partial(forward, self), args, kwargs, several=several)

    pack_aware_forward._thd_mixer = True  # type: ignore[attr-defined]
    return pack_aware_forward


def _tokens_name(forward: Callable[..., Any]) -> str:
    """Return the name of a layer's first argument, which decorators of transformers 5.15 hide."""
    first = list(inspect.signature(forward).parameters.values())[1]
    return "hidden_states" if first.kind is inspect.Parameter.VAR_POSITIONAL else first.name


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _grouped(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, several: bool
) -> Any:
    """Run a layer on padded groups of sequences, outside torch.compile: shapes change with every batch."""
    pack = current_pack()
    assert pack is not None
    device = pack.cu_seqlens_q.device
    if "groups" not in pack.cache:
        pack.cache["groups"] = (
            plan_static_group(pack.cu_seqlens_q, pack.max_length_q, pack.slots)
            if shapes_are_static()
            else plan_groups(pack.lengths, device)
        )
    return run_grouped(forward, args, kwargs, pack.cache["groups"], pack.slots, several=several)


def _refuse(module: nn.Module, tokens: Tensor, pack: Pack, kwargs: dict[str, Any]) -> None:
    if tokens.shape[0] != 1 or tokens.shape[1] != pack.slots:
        raise ValueError(
            f"{type(module).__name__} got {tuple(tokens.shape)} while the model works on a pack of "
            f"{pack.slots} slots. Prefixes and rows of other lengths do not go into a pack."
        )
    for name in (*_CACHES, "attention_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} got a pack and {name}. Call the model with use_cache=False and "
                "attention_mask=None, as THDBatch.hf_kwargs() does."
            )
