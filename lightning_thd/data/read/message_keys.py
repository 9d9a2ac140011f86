"""The table of a conversation's keys: which are read, which mask, which may be dropped, which are refused.

A key of a message that is in no table may still be written by the chat template; ``chat.py`` finds that out
by rendering. Any other key with a value is refused by name, because the model would never see its words. A
user lists further keys that may be dropped in ``metadata_keys=`` of the data module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from lightning_thd._pages import see
from lightning_thd.batch.keys import names

Message = dict[str, Any]
Level = Literal["record", "message", "part", "call"]

# Keys under which models and datasets keep the thoughts of an assistant before its answer.
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thoughts", "thought", "tool_plan")
# Keys by which formats exclude a message from the loss: 0 or false excludes it, 1 or true does not.
MASKS = (
    "weight",  # OpenAI
    "train",  # axolotl, as is "training"
    "training",
    "loss",  # ms-swift, as is "loss_scale"
    "loss_scale",
    "loss_mask",
    "loss_weight",
    "step_loss_mask",  # slime
    "trainable",
)


def _set(row: str) -> frozenset[str]:
    """Return the names in a text, separated by blanks."""
    return frozenset(row.split())


READ: dict[Level, frozenset[str]] = {
    "record": _set(
        "messages conversations conversation prompt completion instruction input output system tools "
        "chat_template_kwargs images image label labels history"
    ),
    "message": frozenset(("role", "content", "tool_calls", "function_call", *THOUGHTS, *MASKS)),
    "part": _set("type text image path url image_url bytes"),
    "call": _set("type function name arguments"),
}

METADATA: dict[Level, frozenset[str]] = {
    "record": _set(
        # numbers and names of the record
        "id _id ids idx index key uid uuid guid row_id sample_id example_id record_id prompt_id question_id "
        "task_id conversation_id conversation_hash conv_id chat_id dialogue_id dialog_id session_id "
        "thread_id message_id request_id user_id hash md5 sha256 "
        # where it comes from
        "source sources source_dataset source_id data_source dataset dataset_name origin provenance subset "
        "split url uri link filename file_name file_path license licence author authors creator annotator "
        "annotators annotator_id worker_id model models model_name model_id model_version generator "
        "generation_model teacher version revision date time timestamp created created_at create_time "
        "update_time updated_at "
        # what it is about, and its statistics
        "category categories subcategory sub_category topic topics subject tag tags domain task tasks "
        "task_name task_type type ability skill skills language languages lang locale country channel meta "
        "metadata meta_data meta_info metainfo extra_info additional_info stats score scores rating ratings "
        "quality quality_score difficulty complexity toxicity toxic redacted moderation openai_moderation "
        "detoxify_moderation num_turns n_turns turn turns num_tokens n_tokens token_count length "
        # the conversation as text, as trainers keep it beside the messages
        "text "
        # how an answer was sampled
        "usage finish_reason temperature top_p top_k max_tokens max_completion_tokens seed n stream "
        "presence_penalty frequency_penalty parallel_tool_calls user service_tier store object "
        "system_fingerprint"
    ),
    "message": _set(
        "id message_id uuid index type status timestamp time date created created_at create_time model "
        "model_name author annotator source meta metadata finish_reason stop_reason usage annotations "
        "logprobs lang language rating score toxicity url hash cache_control tool_call_id"
    ),
    "part": _set("id index annotations cache_control detail"),
    "call": _set("id index cache_control"),
}

# Keys of records whose text mostly repeats messages. They may be dropped if it does, and are else refused.
REPEATS = _set("prompt completion instruction input output question query answer response target solution")

_TOOLS = "Give the tools under 'tools'."
_SYSTEM = "Make it the first message, or name it 'system' in records of ShareGPT or Alpaca."
_PREFERENCE = (
    "Such a record is for preference training: bad answers would be learned. Keep the good answers only."
)
_TALK = "Give the whole conversation as messages."
_WORDS = "Write it into a message."
_OPTION = "Give it in chat_template_kwargs."
_CONTENT = "Give the message's words under 'content'."
_BESIDE = "Give it beside the messages."
_IN_PARTS = "Give images as parts of the content, or under 'images' of the record."
_PER_MESSAGE = "Give a message one number of 0 or 1 under 'weight'."


def _advice(*rows: tuple[str, str]) -> dict[str, str]:
    """Return the advice for each key, from rows of (keys separated by blanks, advice)."""
    return {name: advice for keys, advice in rows for name in keys.split()}


# Keys that are refused with an advice of their own; keys in no table are refused with a general one.
REFUSED: dict[Level, dict[str, str]] = {
    "record": _advice(
        ("tool_defs tool_definitions tool_schemas tool_list available_tools functions function apis", _TOOLS),
        ("system_prompt system_message sys_prompt system_instruction developer_prompt", _SYSTEM),
        (
            "chosen rejected chosen_response rejected_response rejected_messages rejected_images kto_tag "
            "kto_tags margin ranking rank reward rewards advantage advantages preference preferred is_bad",
            _PREFERENCE,
        ),
        ("history choices response_message", _TALK),
        ("context contexts documents document background passage knowledge persona objects", _WORDS),
        ("enable_thinking thinking reasoning_effort add_generation_prompt", _OPTION),
    ),
    "message": _advice(
        ("text texts parts value message output result response refusal audio words body", _CONTENT),
        ("tools tool_defs functions available_tools", _BESIDE),
        ("images image videos video audios", _IN_PARTS),
        ("train_detail training_detail mask masks masked", _PER_MESSAGE),
    ),
    "part": _advice((" ".join((*MASKS, "mask", "train_detail", "training_detail")), _PER_MESSAGE)),
    "call": _advice(("parameters input args kwargs", "Give the call's arguments under 'arguments'.")),
}

_ROLES = _set("system developer user assistant tool function")
# Roles of other formats that mean a person, the assistant, or a call of the assistant.
_OTHER_NAMES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model"), "assistant"),
    **dict.fromkeys(("tool_call", "tool_calls", "function_call", "assistant_tool_call"), "call"),
}
# Roles of other formats for the result of a call: ms-swift's, LLaMA-Factory's, and those of Llama's template.
_RESULTS = _set(
    "tool_response tool_responses tool_result tool_results tool_output function_response function_result "
    "observation environment ipython"
)


def check_metadata_keys(keys: Any) -> None:
    """Refuse ``metadata_keys`` that are no list of names, or name what holds a conversation."""
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"metadata_keys={keys!r}; wanted names of keys, such as ('topic', 'score').")
    needed = [key for key in keys if key in ("messages", "role", "content", "from", "value")]
    if needed:
        raise ValueError(f"metadata_keys has {needed[0]!r}, which holds the conversation. Leave it out.")


def is_empty(value: Any) -> bool:
    """Return whether a value holds nothing: None, or an empty text, list or dict."""
    return value is None or (hasattr(value, "__len__") and not len(value))


def unread(fields: Mapping[str, Any], level: Level) -> list[str]:
    """Return the keys that have a value, but are neither read nor metadata at a level."""
    listed = READ[level] | METADATA[level]
    return [name for name, value in fields.items() if name not in listed and not is_empty(value)]


def unread_error(unread: Iterable[str], level: Level, owner: str) -> ValueError:
    """Build the error that names keys which would be lost, and says what to do."""
    names = list(unread)
    general = "Rename it to a key that is read, or write it into the content."
    advice = REFUSED[level].get(names[0], general)
    return ValueError(
        f"{owner} has {', '.join(map(repr, names))}, which would be lost. {advice} If it may be dropped, "
        f"list it in metadata_keys=. {see('keys-of-conversations')}"
    )


def check_record(record: Mapping[str, Any], own: Collection[str]) -> None:
    """Refuse keys of a record of a conversation, other than its ``own``, whose value would be lost."""
    label = record.get("label")
    if isinstance(label, bool | np.bool_):
        raise ValueError(
            "a label of true or false beside a conversation (KTO): bad answers would be learned. Keep the "
            "good answers only, without the label."
        )
    if isinstance(label, str) and label:
        raise ValueError(
            f"'label' is the text {label!r:.40} beside a conversation, and would be lost. Give a number to "
            "train a classifier, or list 'label' in metadata_keys=."
        )

    # Keys of other kinds of records, such as a prompt beside messages, and keys of no table.
    of_all_kinds = {"tools", "chat_template_kwargs", "images", "image", "label", "labels"}
    of_other_kinds = READ["record"] - of_all_kinds - set(own)
    not_read = {name for name in of_other_kinds if name in record and not is_empty(record[name])}
    not_read |= {name for name in unread(record, "record") if name not in _ELSEWHERE}
    said = [text.strip() for name in own for text in texts(record[name]) if text.strip()]
    lost = [name for name in record if name in not_read and not _repeats(name, record[name], said)]

    if "system" in lost:
        raise ValueError("'system' is beside messages. Make it the first message.")
    if "history" in lost:
        raise ValueError("'history' is not read. Give the whole conversation under 'messages'.")
    if lost:
        raise unread_error(lost, "record", "the record")


# Keys that the reader of records refuses in words of its own.
_ELSEWHERE = frozenset(names("raw", "audio", "media", "weight", "other_weight", "mask"))


def _repeats(name: str, value: Any, said: list[str]) -> bool:
    """Return whether a text under a key of ``REPEATS`` is in the conversation, or holds all of it."""
    text = value.strip() if name in REPEATS and isinstance(value, str) else ""
    if not text:
        return False
    return any(text in words for words in said) or all(words in text for words in said)


def texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, also those in its lists and dicts, except roles and types."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            if key not in ("role", "from", "type"):
                yield from texts(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from texts(entry)


def without_keys(message: Message, dropped: Collection[str]) -> Message:
    """Return a message without the keys that a user lets drop, and without keys whose value is null.

    Inside the arguments of a call, nulls are values and stay.
    """
    shorter: Message = _without(message, dropped)
    content = shorter.get("content")
    if isinstance(content, list):
        shorter["content"] = [_without(part, dropped) for part in content]
    calls = shorter.get("tool_calls")
    if isinstance(calls, list | tuple):
        shorter["tool_calls"] = [_call_without(call, dropped) for call in calls]
    return shorter


def _without(fields: Any, dropped: Collection[str]) -> Any:
    """Return a copy of a dict without dropped and null keys, and any other value as it is."""
    if not isinstance(fields, dict):
        return fields
    return {name: x for name, x in fields.items() if x is not None and name not in dropped}


def _call_without(call: Any, dropped: Collection[str]) -> Any:
    shorter = _without(call, dropped)
    if isinstance(shorter, dict) and "function" in shorter:
        shorter["function"] = _without(shorter["function"], dropped)
    return shorter


def check_role(role: str, template: str) -> None:
    """Refuse a role that is another format's name of one that templates know, unless the template has it."""
    plain = role.strip().lower()
    meant = _OTHER_NAMES.get(plain)
    if plain in _RESULTS and role not in template:
        meant = "tool"
    if meant is None and plain in _ROLES:
        meant = plain  # the role may be written in capitals or with blanks
    if meant == "call":
        raise ValueError(
            f"a message has the role {role!r}, so the call would not be learned. Give the call under "
            "'tool_calls' of a message of the role 'assistant'."
        )
    if meant is not None and meant != role:
        raise ValueError(f"a message has the role {role!r}. Name it {meant!r}, which chat templates know.")


def check_part(part: Mapping[str, Any]) -> None:
    """Refuse keys of a content part whose value would be lost."""
    lost = unread(part, "part")
    if lost:
        raise unread_error(lost, "part", f"a part of type {part.get('type')!r}")


def is_learned(message: Mapping[str, Any], *, answer: bool) -> bool:
    """Return whether the masks of a message leave it in the loss; refuse what cannot be done.

    Args:
        message: its masks hold 0 or 1.
        answer: whether the message can be learned, as those of the assistant that are in no prompt.
    """
    learned = answer
    for name in MASKS:
        value = message.get(name)
        if value is None:
            continue

        if not isinstance(value, int | float | np.generic) or value not in (0, 1):
            raise ValueError(
                f"a message of the role {message['role']!r} has {name}={value!r:.40}; wanted 0 or 1, for the "
                "whole message."
            )
        if value == 1 and not answer:
            raise ValueError(
                f"a message of the role {message['role']!r} has {name}={value!r}, but only answers of the "
                "assistant are learned. Remove the key, or give input_ids and labels."
            )
        learned = learned and value == 1

    return learned
