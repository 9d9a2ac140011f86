"""The table of a sample's keys, in which readers, collators and integrations look up how to treat a key.

A key that is not in the table and holds a tensor or an array is passed to the model as an extra input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

IGNORE_INDEX = -100

Role = Literal[
    "token",  # one value per token; the collator reads it
    "type",  # one value per token, padded with the ids and passed to the model as [1, T]
    "weight",  # the loss weight of the tokens or of the sequence
    "label",  # one value or list per sequence, for heads with one output per sequence
    "sequence",  # written by readers that cut a sequence, for the collator
    "media",  # images and video as inputs of the model
    "raw",  # images and video before the model's processor
    "boundary",  # marks where sequences begin, in rows that are already packed
    # The roles below are refused:
    "audio",
    "mask",  # hides tokens from the loss under a name that is not read
    "other_weight",  # a weight under a name that is not read
    "other_boundary",  # boundaries under a name that is not read
    "made",  # a field of the batch, or an argument of the model, that the batch computes
]

_NAMES: dict[Role, str] = {
    "token": "input_ids labels attention_mask position_ids",
    "type": "token_type_ids mm_token_type_ids",
    "weight": "weights",
    "label": "label",
    "sequence": "next_label next_weight whole_weight example_parts",
    "media": "pixel_values pixel_values_videos image_grid_thw video_grid_thw",
    "raw": "image images video videos",
    "boundary": "lengths seq_lengths cu_seqlens cu_seqlens_padded",
    "audio": "audio audios input_features input_values audio_values audio_features",
    "mask": "loss_mask label_mask labels_mask target_mask completion_mask response_mask prompt_mask "
    "assistant_mask assistant_masks prompt_length prompt_len prompt_lengths mask masks loss_masks "
    "label_masks train_mask learn_mask completion_masks response_masks prompt_masks target_masks "
    "shift_labels answer_start_idx context_length source_len source_length source_mask",
    "other_weight": "weight loss_weight loss_weights token_weight token_weights label_weight label_weights "
    "sample_weight sample_weights sequence_weight sequence_weights",
    "other_boundary": "segment_ids document_ids doc_ids seq_idx sequence_lengths seq_lens seqlens doc_lens "
    "doc_lengths document_lengths input_pos seq_start_id seq_boundaries cumulative_len cu_lens cu_doc_lens "
    "cu_seq_lens",
    "made": "boundaries cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k use_cache targets",
}
KEYS: dict[str, Role] = {name: role for role, row in _NAMES.items() for name in row.split()}

_REFUSED: dict[str, str] = {
    "mask": ", which is not read, so the tokens that it hides would be trained on. Give unshifted labels "
    "instead, with -100 for each token that must not be learned.",
    "other_weight": ", which is not read. Rename it to 'weights' (one value per token or one per "
    "sequence), or drop it.",
    "other_boundary": ", which is not read, so that sequences of one row would see each other. Give "
    "lengths, cu_seqlens or position_ids instead, or one sequence per row.",
    "audio": ": audio inputs cannot be packed, only tokens, images and video. Remove the key or use a "
    "padded batch.",
}


def names(*roles: Role) -> tuple[str, ...]:
    """Return the keys that have one of the roles, in the order of the table."""
    return tuple(name for name, role in KEYS.items() if role in roles)


# Keys with one value per token in a checked sample. They are cut with the tokens of a truncated sequence.
PER_TOKEN = names("token", "type")
TYPES = names("type")
COLLATED = frozenset(names("token", "type", "weight", "label", "sequence"))


def inputs(sample: Iterable[str]) -> list[str]:
    """Return the sorted names of a sample's extra model inputs, such as images: all keys not in COLLATED."""
    return sorted(name for name in sample if name not in COLLATED)


def refuse_keys(keys: Iterable[str]) -> None:
    """Refuse audio, and refuse masks, weights and boundaries under names that are not read."""
    if isinstance(keys, Mapping):  # datasets fill absent keys of a row with None
        keys = [name for name, value in keys.items() if value is not None]
    for name in keys:
        why = _REFUSED.get(KEYS.get(name, ""))
        if why is not None:
            raise ValueError(f"Samples carry {name!r}{why}")


def refuse_boundaries(sample: Mapping[str, Any], name: str) -> None:
    """Refuse a sample with boundaries of several sequences, because these would see each other."""
    marks = [key for key, value in sample.items() if KEYS.get(key) == "boundary" and value is not None]
    if marks:
        raise ValueError(
            f"{name} carries {', '.join(marks)}, which marks several sequences in a row, but a sample is one "
            "sequence. Give the sequences one by one, or drop the key. THDDataModule accepts such rows in a "
            "dataset."
        )
