"""Position tables of the RoBERTa kind -> positions that restart in every sequence of a pack.

These tables start at ``padding_idx + 1`` and skip padding tokens, and they compute positions from the tokens
of a row. ESM also scales a row by its share of masked tokens; here each sequence has its own share. T slots
in a pack.

Checked with transformers 5.19, 5.23 and 5.24. A table with a ``padding_idx`` in a layer that is not listed is
refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_thd.boundaries import Boundaries
from lightning_thd.models.adapted import Adapter, adapt, kind_of
from lightning_thd.models.families.releases import unknown_layer
from lightning_thd.models.pack import model_pack

LAYERS: Final = frozenset(
    {"AltRobertaEmbeddings", "BridgeTowerTextEmbeddings", "CamembertEmbeddings", "ClapTextEmbeddings"}
    | {"Data2VecTextEmbeddings", "EsmEmbeddings", "EvollaSaProtEmbeddings", "IBertEmbeddings"}
    | {"Kosmos2TextSinusoidalPositionalEmbedding", "Kosmos2_5TextSinusoidalPositionalEmbedding"}
    | {"LayoutLMv3TextEmbeddings", "LiltTextEmbeddings", "LongformerEmbeddings", "LukeEmbeddings"}
    | {"MPNetEmbeddings", "MarkupLMEmbeddings", "PPDocLayoutV2TextEmbeddings", "RobertaEmbeddings"}
    | {"RobertaPreLayerNormEmbeddings", "XLMRobertaEmbeddings", "XLMRobertaXLEmbeddings", "XmodEmbeddings"}
)
_NEEDED: Final = {"input_ids", "inputs_embeds", "position_ids"}
_WHAT: Final = "counts positions from padding tokens"


def adapt_layers(model: nn.Module) -> None:
    """Adapt the position tables of a model; refuse those that are not known."""
    for module in model.modules():
        if kind_of(module, LAYERS):
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            if not set(names) >= _NEEDED or not hasattr(module, "padding_idx"):
                raise ValueError(unknown_layer(module, _WHAT, f"takes {', '.join(names)}"))
            adapt(module, PaddedPositions)
        elif _has_unknown_table(module):
            raise ValueError(unknown_layer(module, _WHAT, "is not among the layers that were checked"))


def _has_unknown_table(module: nn.Module) -> bool:
    """Return whether a module has a table of positions with a row for padding."""
    return any(
        "position" in name and isinstance(child, nn.Embedding) and child.padding_idx is not None
        for name, child in module.named_children()
    )


class PaddedPositions(Adapter):
    """The adapter of embeddings that compute positions from tokens."""

    @classmethod
    def _thd_describe(cls, original: Any) -> dict[str, Any]:
        return {"_thd_names": tuple(inspect.signature(original.forward).parameters)[1:]}

    def _thd_run(self: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        pack = model_pack()
        if pack is None:
            return forward(self, *args, **kwargs)

        arguments = {**dict(zip(self._thd_names, args, strict=False)), **kwargs}
        input_ids = arguments.get("input_ids")
        position_ids = arguments.get("position_ids")
        arguments["position_ids"] = padded_positions(input_ids, position_ids, self.padding_idx, pack)
        if input_ids is not None and getattr(self, "token_dropout", False):
            pack.require_own_slots(self, "its token_dropout counts the masked tokens of whole sequences")
            embeds = arguments.get("inputs_embeds")
            if embeds is None:
                embeds = self.word_embeddings(input_ids)
            arguments["inputs_embeds"] = _without_masked(embeds, input_ids == self.mask_token_id, pack)
            arguments["input_ids"] = None

        return forward(self, **arguments)


def padded_positions(
    input_ids: Tensor | None, position_ids: Tensor | None, padding_idx: int, pack: Boundaries
) -> Tensor:
    """Count positions of each sequence as RoBERTa does: from ``padding_idx + 1``, skipping padding."""
    if input_ids is None:
        if position_ids is None:
            position_ids = pack.positions[None]
        return position_ids + (padding_idx + 1)

    real = input_ids[0].ne(padding_idx).long()  # 1 for a token, 0 for padding
    positions = _count_tokens(real, pack)
    if position_ids is not None:  # those of a long trailing pad stay within the table
        positions = torch.minimum(positions, position_ids[0] + 1)
    return (positions * real + padding_idx)[None]


def _count_tokens(real: Tensor, pack: Boundaries) -> Tensor:
    """Number the tokens of every sequence from 1; ``real`` is 1 for a token, 0 for padding, int64 ``[T]``."""
    if not pack.own_slots:  # the first tokens of a sequence are on another rank, or in slots of another one
        counted: Tensor = _count_unfolded(real, pack)
        return counted

    earlier = real.cumsum(0) - real
    starts = pack.offsets[:-1].long().clamp(max=pack.slots - 1)
    earlier_sequences = earlier.index_select(0, starts)
    lengths = pack.offsets.diff()
    return earlier - earlier_sequences.repeat_interleave(lengths, output_size=pack.slots) + 1


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _count_unfolded(real: Tensor, pack: Boundaries) -> Tensor:
    unfolded = pack.unfolded()
    assert unfolded is not None
    return unfolded.keep(_count_tokens(unfolded.gather(real), unfolded.boundaries))


# The share of tokens that ESM masked in its training, a constant of its modeling file.
_HIDDEN_IN_TRAINING = 0.15 * 0.8


def _without_masked(embeds: Tensor, masked: Tensor, pack: Boundaries) -> Tensor:
    """Zero ESM's masked tokens, and scale each sequence by 0.88 / (its share of tokens not masked)."""
    members = pack.seq_idx[0].long()
    offsets = pack.offsets if pack.real_offsets is None else pack.real_offsets
    lengths = offsets.diff()
    counts = torch.zeros_like(lengths, dtype=torch.float32).index_add(0, members, masked[0].float())
    factors = (1 - _HIDDEN_IN_TRAINING) / (1 - counts / lengths.clamp(min=1))
    embeds = embeds.masked_fill(masked.unsqueeze(-1), 0.0)
    return (embeds * factors.index_select(0, members)[None, :, None]).to(embeds.dtype)
