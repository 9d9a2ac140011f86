"""Arguments of varlen_attention -> the same, or an error that says what came, what was wanted and what to do."""

from __future__ import annotations

from torch import Tensor


def checked_offsets(cu_seqlens: Tensor, total: int, max_seqlen: int, side: str) -> list[int]:
    """Read offsets that lie on the CPU and check that they cover every row.

    Args:
        cu_seqlens: int ``[S + 1]`` on the CPU.
        total: rows of the packed tensor.
        max_seqlen: what the caller says the longest sequence is.
        side: "q" or "kv", for the message.

    Returns:
        The offsets as ints.
    """
    offsets: list[int] = cu_seqlens.tolist()
    name = f"cu_seqlens_{side}"
    if offsets[0] != 0 or offsets[-1] != total:
        raise ValueError(
            f"{name} runs from {offsets[0]} to {offsets[-1]} but must run from 0 to {total}, the rows of "
            f"{'q' if side == 'q' else 'k and v'}. Kernels leave rows outside every sequence unwritten and gradients "
            "turn NaN: give padding at the end a sequence of its own."
        )
    longest = 0
    for i, (start, stop) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if stop < start:
            raise ValueError(
                f"{name} falls from {start} to {stop} at sequence {i}; offsets never decrease. "
                "Build them with lightning_thd.seqlens.cu_seqlens_from_lengths."
            )
        longest = max(longest, stop - start)
    if longest > max_seqlen:
        raise ValueError(
            f"max_seqlen_{side}={max_seqlen} but {name} holds a sequence of {longest}: GPU kernels would leave its end "
            f"out. Pass max_seqlen_{side}={longest} or more."
        )
    return offsets
