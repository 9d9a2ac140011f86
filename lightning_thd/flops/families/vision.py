"""A vision config of the Qwen-VL line -> the layers of its tower and projector, per patch and per frame.

Megatron-Bridge's count: attention between all patches of one frame, never halved, and a projector run once
for the tower and once for every deepstack layer; and the convolution that makes patches, which it leaves out.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_thd.flops.families import parts
from lightning_thd.flops.families.sizes import Sizes
from lightning_thd.flops.terms import Basis, Layer, Term, matmul, scores

_TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def tower(config: Sizes) -> tuple[list[Layer], int]:
    """Return the layers of a vision tower and its projector.

    Returns:
        The layers, none for a family whose images are not counted, and the patches merged into one token.
    """
    sizes = config.sub("vision_config")
    if sizes is None or config.model_type not in _TOWERS:
        return [], 4
    hidden = sizes.size("embed_dim") if config.model_type == "qwen2_vl" else sizes.hidden
    patch = sizes.size("patch_size") ** 2 * sizes.size("temporal_patch_size", default=2)
    channels = sizes.size("in_channels", "in_chans", default=3)
    embed = matmul("patch_embed", channels * patch * hidden, kind="vision", basis="patch")
    embed = replace(embed, input_grad=0)  # pixels take no gradient
    layers = [Layer(path="visual.patch_embed", terms=(embed,), recomputable=False)]
    layers += [
        Layer(path=f"visual.blocks.{index}", terms=tuple(_block(config.model_type, sizes, hidden, index)))
        for index in range(sizes.size("depth"))
    ]
    merge = sizes.size("spatial_merge_size") ** 2
    wide = hidden * merge
    out = sizes.size("hidden_size" if config.model_type == "qwen2_vl" else "out_hidden_size")
    projectors = 1 + len(sizes.get("deepstack_visual_indexes", default=()))
    projector = matmul(
        "projector", projectors * (wide * wide + wide * out), kind="vision", basis="merged_patch"
    )
    return [*layers, Layer(path="visual.merger", terms=(projector,), recomputable=False)], merge


def _block(family: str, sizes: Sizes, hidden: int, index: int) -> list[Term]:
    heads = sizes.size("num_heads")
    head_dim = hidden // heads
    window = None
    basis: Basis = "patch_pair"
    if family == "qwen2_5_vl" and index not in sizes.get("fullatt_block_indexes", default=()):
        basis, window = "patch_window_pair", sizes.size("window_size") // sizes.size("patch_size")
    if family == "qwen2_vl":
        inner = int(hidden * sizes.get("mlp_ratio", default=4))
    else:
        inner = sizes.size("intermediate_size")
    gated = family == "qwen2_5_vl"
    return [
        matmul("vision_qkv", 3 * hidden * hidden, kind="vision", basis="patch"),
        scores(heads, head_dim, head_dim, window=window, basis=basis, kind="vision", name="vision_attention"),
        matmul("vision_out", hidden * hidden, kind="vision", basis="patch"),
        *parts.mlp(hidden, inner, gated=gated, name="vision_mlp", kind="vision", basis="patch"),
    ]
