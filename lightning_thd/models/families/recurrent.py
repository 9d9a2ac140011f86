"""State-space, linear-attention and short-convolution layers -> the same layers, reset at every sequence.

Inside a pack, an adapted layer passes seq_idx and cu_seqlens to the fused kernels. Without usable kernels it
runs on padded groups of sequences. If sequences are not whole on this rank, or share slots, its state is
carried between their parts (see ``passing``). If it cannot be carried, the layer runs on an unfolded row.
Legend: T slots in a pack, N slots of this rank.

Checked with transformers 5.19, 5.23 and 5.24; in other releases all layers run on padded groups. A layer with
a convolution or a state that is not listed is refused (see ``refusals``).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_thd._imports import available
from lightning_thd._known_bad import known_problems
from lightning_thd._static import shapes_are_static
from lightning_thd.boundaries import Boundaries
from lightning_thd.models.adapted import Adapter, adapt, kind_of
from lightning_thd.models.families.padded_groups import of_tokens, plan_groups, plan_static_group, run_grouped
from lightning_thd.models.families.releases import is_checked
from lightning_thd.models.masks import UnreadMask
from lightning_thd.models.pack import Scope, current_pack, current_scope, model_pack, scoped
from lightning_thd.models.passing.adopt import (
    carried_functions,
    carrier_of,
    functions_in_torch,
    run_carried,
)
from lightning_thd.seqlens import cu_seqlens_from_lengths
from lightning_thd.warnings import SlowWarning, warn

# Class of a layer -> packages whose kernels keep the sequences of a pack apart; None without such kernels.
_SSD: Final = ("mamba_ssm", "causal_conv1d")
_DELTA: Final = ("fla", "causal_conv1d")
MIXERS: Final[dict[str, tuple[str, ...] | None]] = {
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer")),
    **dict.fromkeys(("RecurrentGemmaRecurrentBlock", "MiniMaxLightningAttention", "xLSTMLayer")),
    **dict.fromkeys(("RwkvSelfAttention", "RwkvFeedForward", "ZayaCCAProjection")),
    **dict.fromkeys(("InklingShortConvolution", "Inkling2ShortConvolution", "Qwen4ExpTextGatedDeltaNet")),
    **dict.fromkeys(("Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer"), _SSD),
    **dict.fromkeys(("FalconH1Mixer", "NemotronHMamba2Mixer", "Zamba2MambaMixer"), _SSD),
    **dict.fromkeys(("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), _DELTA),
    **dict.fromkeys(("OlmoHybridGatedDeltaNet", "KimiLinearDeltaAttention"), _DELTA),
    "BailingHybridDeltaAttention": _DELTA,
    # causal-conv1d 1.7.0 takes sequence ids only with channels-last inputs, which these layers do not pass.
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")),
}
# Layers that return several values per token: queries, keys and values.
_SEVERAL_OUTPUTS: Final = frozenset({"ZayaCCAProjection"})
_CACHES = ("cache_params", "past_key_values", "past_key_value", "cache", "state")
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def adapt_layers(model: nn.Module) -> None:
    """Adapt the state-space, linear-attention and convolution layers of a model."""
    for module in model.modules():
        if kind_of(module, MIXERS):
            adapt(module, Recurrent)


def has_mixers(model: nn.Module) -> bool:
    """Return whether the model has an adapted state-space, linear-attention or convolution layer."""
    return any(isinstance(module, Recurrent) for module in model.modules())


class Recurrent(Adapter):
    """The adapter of layers that carry a state or a convolution along a row."""

    @classmethod
    def _thd_describe(cls, original: Any) -> dict[str, Any]:
        name = next(base.__name__ for base in original.__mro__ if base.__name__ in MIXERS)
        kernels = MIXERS[name]
        if kernels is not None and not _hands_boundaries_on(original):
            kernels = None  # layers that would drop the boundaries: groups of padded sequences are exact
        return {
            "_thd_kernels": kernels,
            "_thd_carried": carried_functions(name, original),
            "_thd_several": name in _SEVERAL_OUTPUTS,
            "_thd_tokens": list(inspect.signature(original.forward).parameters)[1],
        }

    def _thd_run(self: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        pack = current_pack() and model_pack()  # current_pack raises if a recomputation lost its pack
        if pack is None:
            return forward(self, *args, **kwargs)

        tokens = args[0] if args else kwargs[self._thd_tokens]
        kwargs = {
            name: None if isinstance(value, UnreadMask) else value
            for name, value in kwargs.items()
            if name not in _BOUNDARIES
        }
        scope = current_scope()
        if scope is not None and scope.shows_all and "attention_mask" in kwargs:
            kwargs["attention_mask"] = None  # ours, see ``families/plain_masks.py``

        _refuse(self, tokens, pack, kwargs)
        if not pack.own_slots:
            return _run_on_parts(self, forward, args, kwargs, pack)

        kernels = self._thd_kernels
        if kernels is not None and can_run(kernels, tokens):
            return forward(self, *args, **kwargs, **boundaries(kernels, pack, self._thd_original))

        with functions_in_torch(self._thd_original, tokens):
            return _grouped(functools.partial(forward, self), args, kwargs, several=self._thd_several)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _grouped(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, several: bool
) -> Any:
    """Run a layer on padded groups of sequences, outside torch.compile: shapes change with every batch."""
    pack = current_pack()
    assert pack is not None
    return run_grouped(forward, args, kwargs, pack.once(_groups), pack.slots, several=several)


def _groups(pack: Boundaries) -> Any:
    """Plan the groups of sequences of like length, or one group if the step is recorded."""
    if shapes_are_static():
        return plan_static_group(pack.offsets, pack.max_seqlen, pack.slots)
    return plan_groups(pack.lengths, pack.offsets.device)


def _offsets_on_host(pack: Boundaries) -> Tensor:
    return cu_seqlens_from_lengths(pack.lengths)


def _refuse(module: nn.Module, tokens: Tensor, pack: Boundaries, kwargs: dict[str, Any]) -> None:
    """Raise if a layer gets other tokens than the pack's, a cache or a mask."""
    if tokens.shape[0] != 1 or tokens.shape[1] != pack.slots:
        raise ValueError(
            f"{type(module).__name__} got {tuple(tokens.shape)} while the model runs on a pack of "
            f"{pack.slots} slots; wanted [1, {pack.slots}, ...]. Pass this layer the tokens of the pack only."
        )
    for name in (*_CACHES, "attention_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} got a pack and {name}. Call model(**batch.hf_kwargs()) without it."
            )


def can_run(kernels: tuple[str, ...] | None, tokens: Tensor) -> bool:
    """Return whether a layer's fused kernels run on the device of ``tokens``, and keep sequences apart."""
    if kernels is None or not _on_gpu(tokens) or ("fla" in kernels and shapes_are_static()):
        return False  # fla's kernels copy values from the device, which a recorded step cannot do
    return bool(_usable(kernels, tokens.device.index or 0))


def _hands_boundaries_on(layer: Any) -> bool:
    """Return whether a layer passes its keywords to its kernels, as those of the checked releases do."""
    parameters = inspect.signature(layer.forward).parameters.values()
    return is_checked() and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def boundaries(kernels: tuple[str, ...], pack: Boundaries, layer: type) -> dict[str, Any]:
    """Return the boundaries of sequences as keyword arguments that transformers passes to the kernels."""
    module = sys.modules.get(layer.__module__)
    kimi = getattr(module, "chunk_kimi_delta_attention", None)  # its layers use the kernel's keywords
    name = "cu_seq_lens_q" if kimi is None else "cu_seqlens"
    keywords: dict[str, Any] = {"seq_idx": pack.seq_idx, name: pack.offsets}
    rule = kimi or getattr(module, "torch_chunk_gated_delta_rule", None)
    # Since 5.20, transformers wraps the rule and passes a kernel only the keywords that the kernel takes.
    if "fla" in kernels and hasattr(rule, "__wrapped__"):
        keywords["cu_seqlens_cpu"] = pack.once(_offsets_on_host)
    return keywords


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _usable(kernels: tuple[str, ...], device: int) -> bool:
    return all(map(available, kernels)) and all(_is_sound(kernel, _capability(device)) for kernel in kernels)


@cache
def _is_sound(kernel: str, capability: int | None) -> bool:
    """Return whether no wrong results are known of a kernel's installed version; else warn."""
    problems = known_problems(kernel, capability=capability)
    for entry in problems:
        warn(f"{entry.problem}: {entry.instead}. Until then, layers run on padded groups.", SlowWarning)
    return not problems


@cache
def _capability(device: int) -> int | None:
    return torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else None


def _on_gpu(tokens: Tensor) -> bool:
    return tokens.is_cuda


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_on_parts(
    layer: Any, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], pack: Boundaries
) -> Any:
    """Run a layer on a pack whose slots hold parts of sequences, outside torch.compile."""
    carrier = carrier_of(pack, layer)
    if carrier is not None:
        return run_carried(layer, functools.partial(forward, layer), args, kwargs, carrier)
    return run_unfolded(functools.partial(Recurrent._thd_run, layer, forward), args, kwargs, pack)


def run_unfolded(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], pack: Boundaries
) -> Any:
    """Call a layer on a row that holds more of every sequence, and keep this rank's slots ``[1, N, ...]``."""
    scope = current_scope()
    unfolded = pack.unfolded()
    assert scope is not None
    assert unfolded is not None
    boundaries = unfolded.boundaries
    on_row = Scope(boundaries, scope.outer, module=scope.module, families=scope.families, masks=scope.masks)

    with scoped(on_row):
        gathered = of_tokens(lambda value: unfolded.gather(value[0])[None], pack.slots)
        out = function(*map(gathered, args), **{name: gathered(value) for name, value in kwargs.items()})
        return of_tokens(lambda value: unfolded.keep(value[0])[None], boundaries.slots)(out)
