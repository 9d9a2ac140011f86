"""Vision towers of the Qwen-VL families -> one attention call per layer for all images of a pack.

transformers calls attention once per image in each layer, except for flash attention. With "thd" the layers
of these towers take the branch for flash attention: they read the name of their attention from their config,
and adapted layers show them a config whose name says flash.

Checked with transformers 5.19, 5.23 and 5.24; in those between, the towers have the same source. In other
releases the loop over images runs, which is exact too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor, nn

from lightning_thd.models.adapted import Adapter, adapt, kind_of
from lightning_thd.models.families.releases import is_checked

# The name under which the layers find the same attention function.
FLASH_NAME: Final = "thd_flash_attention"
# Class of a tower -> the class of its attention layers, and whether it attends in windows.
_TOWERS: Final = {
    "Qwen2VisionTransformerPretrainedModel": ("VisionAttention", False),
    "Qwen2_5_VisionTransformerPretrainedModel": ("Qwen2_5_VLVisionAttention", True),
    "Qwen3VLVisionModel": ("Qwen3VLVisionAttention", False),
    "Qwen3VLMoeVisionModel": ("Qwen3VLMoeVisionAttention", False),
    "Qwen3_5VisionModel": ("Qwen3_5VisionAttention", False),
    "Qwen3_5MoeVisionModel": ("Qwen3_5MoeVisionAttention", False),
}


def adapt_layers(model: nn.Module) -> None:
    """Adapt a vision tower and its attention layers."""
    if not is_checked():
        return

    for tower in model.modules():
        name = kind_of(tower, _TOWERS)
        if name is None:
            continue
        attention, _ = _TOWERS[name]
        layers = [layer for layer in tower.modules() if kind_of(layer, (attention,))]
        if layers:
            adapt(tower, TowerOfPacks)
        for layer in layers:
            adapt(layer, ImagesAtOnce)


class _ShowsFlash:
    """The config of a layer, but the name of its attention says flash."""

    def __init__(self, config: Any) -> None:
        self._thd_config = config
        self._attn_implementation = FLASH_NAME

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_thd_config"], name)


class ImagesAtOnce(Adapter):
    """The adapter of a tower's attention layers."""

    _thd_tower = True  # ``thd_attention`` takes the offsets of images from layers with this mark

    @property
    def config(self) -> Any:
        """Return the layer's config; with "thd", as a layer with flash attention sees it."""
        config = self.__dict__["config"]
        return _ShowsFlash(config) if config._attn_implementation == "thd" else config

    @config.setter
    def config(self, config: Any) -> None:
        self.__dict__["config"] = config

    def _thd_run(self: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)


class TowerOfPacks(Adapter):
    """The adapter of a tower: its layers are told how long the largest frame and the largest window are."""

    @classmethod
    def _thd_describe(cls, original: Any) -> dict[str, Any]:
        name = next(base.__name__ for base in original.__mro__ if base.__name__ in _TOWERS)
        return {"_thd_windows": _TOWERS[name][1]}

    def _thd_run(self: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _run_tower(self, forward, *args, **kwargs)


def _run_tower(
    self: Any, forward: Callable[..., Any], hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any
) -> Any:
    if grid_thw is None:
        raise ValueError(f"{type(self).__name__} got pixels but no grid: add image_grid_thw.")

    if self.config._attn_implementation == "thd":  # without max_seqlen, each layer would read the device
        frames = [(height, width) for _, height, width in grid_thw.tolist()]  # in patches
        kwargs.setdefault("max_seqlen", max(height * width for height, width in frames))
        if self._thd_windows:
            # As transformers cuts windows: whole squares of the patches that are merged into one token.
            merge = self.spatial_merge_size
            edge = self.window_size // self.patch_size // merge * merge
            largest = max(min(edge, height) * min(edge, width) for height, width in frames)
            kwargs.setdefault("max_window_seqlen", largest)

    return forward(self, hidden_states, grid_thw, **kwargs)
