"""Vision towers of the Qwen-VL families -> one attention call per layer for all images of a pack.

transformers calls attention once per image in each layer, except for flash attention. With "thd" these
towers take the branch for flash attention.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from torch import Tensor

from lightning_thd._patches import patch

_KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_ASKED = "is_flash_attention_requested"


def adopt_tower(model_class: Any) -> None:
    """Patch a vision tower's class and the file that defines it, so that "thd" gets the offsets of images."""
    module: Any = sys.modules.get(model_class.__module__)
    known = any(model_class.__module__.endswith(f".modeling_{kind}") for kind in _KINDS)
    names = vars(model_class).get("forward") and inspect.unwrap(model_class.forward).__code__.co_names
    if not known or "get_vision_attention_seqlens" not in (names or ()) or not hasattr(module, _ASKED):
        return  # not such a tower, or another release, whose loop over images is exact too
    if hasattr(model_class.forward, "_thd_tower"):
        return
    patch("vision towers", model_class, "forward", _with_longest(model_class.forward))
    if not hasattr(getattr(module, _ASKED), "_thd_tower"):
        patch("vision towers", module, _ASKED, _also_for_thd(getattr(module, _ASKED)))
    for layer in vars(module).values():
        if inspect.isclass(layer) and layer.__name__.endswith("VisionAttention"):
            patch("vision towers", layer, "_thd_tower", True)


def _also_for_thd(asked: Any) -> Any:
    @functools.wraps(asked)
    def is_flash_attention_requested(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        if config is not None and config._attn_implementation == "thd":
            return True
        return bool(asked(config, *args, **kwargs))

    is_flash_attention_requested._thd_tower = True  # type: ignore[attr-defined]
    return is_flash_attention_requested


def _with_longest(forward: Any) -> Any:
    """Wrap a tower's forward to give its layers the patch counts of the largest frame and window."""
    windows = "max_window_seqlen" in inspect.unwrap(forward).__code__.co_consts

    @functools.wraps(forward)
    def forward_of_tower(self: Any, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        if grid_thw is None:
            raise ValueError(f"{type(self).__name__} got pixels but no grid: add image_grid_thw.")
        if self.config._attn_implementation == "thd":  # without max_seqlen, each layer would read the device
            areas = [(height, width) for _, height, width in grid_thw.tolist()]
            kwargs.setdefault("max_seqlen", max(height * width for height, width in areas))
            if windows:
                merge = self.spatial_merge_size
                edge = self.window_size // self.patch_size // merge * merge
                longest = max(min(edge, height) * min(edge, width) for height, width in areas)
                kwargs.setdefault("max_window_seqlen", longest)
        return forward(self, hidden_states, grid_thw, **kwargs)

    forward_of_tower._thd_tower = True  # type: ignore[attr-defined]
    return forward_of_tower
