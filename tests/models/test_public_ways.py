"""Every family, built in every public way, gives on a pack what it gives unpacked, or refuses the pack."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from lightning_thd import causal_lm_loss
from tests.models import matrix
from tests.models.families import FAMILIES, build

# fp32 rounding of two orders of summation, as in test_matrix.py.
TOLERANCE = 1e-5


def stock(name: str) -> Any:
    """Build the model of the oracle, which runs eager attention."""
    model = build(name, "eager")
    model.load_state_dict(matrix.oracle(name)[0])
    return model


def with_weights(model: Any, name: str) -> Any:
    model.load_state_dict(matrix.oracle(name)[0])
    return model


def from_config(name: str, _: Path) -> Any:
    return with_weights(build(name, "thd"), name)


def from_constructor(name: str, _: Path) -> Any:
    model_class = type(stock(name))
    config = stock(name).config
    config._attn_implementation = "thd"
    return with_weights(model_class(config), name)


def from_pretrained(name: str, folder: Path) -> Any:
    stock(name).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="thd")


def saved_with_thd(name: str, folder: Path) -> Any:
    from_config(name, folder).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="thd")


def switched(name: str, _: Path) -> Any:
    model = stock(name)
    model.set_attn_implementation("thd")
    return model


def copied(name: str, folder: Path) -> Any:
    return copy.deepcopy(from_config(name, folder))


def pickled(name: str, folder: Path) -> Any:
    return pickle.loads(pickle.dumps(from_config(name, folder)))


def switched_then_copied(name: str, folder: Path) -> Any:
    return copy.deepcopy(switched(name, folder))


def switched_and_back_again(name: str, folder: Path) -> Any:
    model = from_config(name, folder)
    model.set_attn_implementation("eager")
    model.set_attn_implementation("thd")
    return model


def config_switched_by_hand(name: str, _: Path) -> Any:
    model = stock(name)
    model.config._attn_implementation = "thd"
    return model


WAYS: dict[str, Callable[[str, Path], Any]] = {
    way.__name__: way
    for way in (
        from_config,
        from_constructor,
        from_pretrained,
        saved_with_thd,
        switched,
        copied,
        pickled,
        switched_then_copied,
        switched_and_back_again,
        config_switched_by_hand,
    )
}
# These have to work: a user who only swaps the attention builds models so.
WORKING = set(WAYS) - {"config_switched_by_hand"}


def error_of(model: Any, name: str) -> float:
    """Return the largest relative difference of a pack's logits from those of the sequences, each alone."""
    batch, *_ = matrix.packs()
    expected = matrix.oracle(name)[1].logits
    with torch.no_grad():
        logits = model(**batch.hf_kwargs()).logits
    pairs = list(zip(batch.unpack(logits), expected, strict=False))
    assert len(pairs) == len(batch.lengths)
    return max(matrix.relative_error(ours.float(), theirs) for ours, theirs in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_built_in_a_public_way_is_exact_or_refused(name: str, way: str, tmp_path: Path) -> None:
    model = WAYS[way](name, tmp_path).eval()
    error = 0.0
    refusal = ""

    try:
        error = error_of(model, name)
    except ValueError as raised:
        refusal = str(raised)

    if refusal:
        assert way not in WORKING, f"{name}, {way}: the pack is refused: {refusal}"
        # "packed sequences": transformers' own layers of linear attention refuse what they would mix.
        words = ("attn_implementation", "prepare", "packed sequences")
        assert any(word in refusal for word in words), refusal
    elif way in WORKING:
        assert error <= TOLERANCE, f"{name}, {way}: logits differ by {error:.1e} of the largest"
    elif error > TOLERANCE:
        # A family without attention never meets the attention function. The loss notices it: it prepares the
        # model or refuses it.
        batch = matrix.packs()[0]
        expected = causal_lm_loss(from_config(name, tmp_path).eval(), batch)
        assert torch.equal(causal_lm_loss(model, batch), expected), f"{name}, {way}: the loss differs"
