"""What transformers' mask builder is asked for -> None, or an error where "thd" could not mean the same."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def thd_mask(*, attention_mask: Tensor | None = None, **_: Any) -> None:  # noqa: ANN401
    """Stand in for a mask: boundaries are in cu_seqlens, causality and windows in other arguments.

    Args:
        attention_mask: the user's padding mask ``[B, T]``; must be None or all true.

    Raises:
        ValueError: when the mask hides something.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            f"attn_implementation='thd' got an attention_mask {tuple(attention_mask.shape)} hiding tokens. "
            "Pack the rows instead, THDBatch.from_padded(input_ids, attention_mask), and call "
            "model(**batch.hf_kwargs()); or use attn_implementation='sdpa'."
        )
