"""How a model announces its packs: nesting, errors, checkpoints of every kind, backward threads."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("transformers")

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from lightning_thd.models import packed, register_thd
from lightning_thd.models.pack import current_scope
from tests.models import matrix
from tests.models.families import build
from tests.models.matrix import checkpoint, thd_model

register_thd()
OTHER = torch.tensor([0, 8, 9, 24, 27, 35], dtype=torch.int32)  # not the offsets of matrix.packs()[0]
# Neither hands cu_seq_lens down to all layers that need it.
SILENT = ["stablelm", "mamba2", "zamba2", "jamba"]


@pytest.mark.parametrize("name", SILENT)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_layers_know_their_pack(name: str, use_reentrant: bool) -> None:
    model = thd_model(name).train()
    checkpoint(model, use_reentrant=use_reentrant)
    matrix.assert_same(matrix.run_packed(model), matrix.oracle(name)[1], tolerance=1e-5)
    stock = build(name, "eager").train()  # of the same patched classes, and without a pack
    checkpoint(stock, use_reentrant=use_reentrant)
    stock.enable_input_require_grads()  # type: ignore[operator]
    stock(OTHER[None].long(), use_cache=False).logits.sum().backward()


def test_the_scope_ends_with_the_model_also_after_an_error() -> None:
    model = build("stablelm", "thd").eval()
    (batch, _) = matrix.packs()
    kwargs = batch.hf_kwargs()
    layer = model.get_submodule("model.layers.1")
    ids = kwargs["input_ids"]
    model(**kwargs)
    assert current_scope() is None
    stops: Any = [(IndexError, {"input_ids": ids + 1000}), (ValueError, {"attention_mask": ids})]
    for error, changes in [*stops, (KeyboardInterrupt, {})]:  # torch calls no hook after the last
        with pytest.raises(error), patch.object(layer, "forward", side_effect=error):
            model(**{**kwargs, **changes})
        assert current_scope() is None


def test_another_model_called_along_the_way_keeps_its_own_rows() -> None:
    judge = build("stablelm", "thd").eval()
    batch, _ = matrix.packs()
    rows = torch.arange(3, 13).view(2, 5)
    alone = judge(rows, use_cache=False).logits
    with packed(batch):
        assert torch.equal(judge(rows, use_cache=False).logits, alone)


def test_positions_that_restart_make_a_pack_without_cu_seqlens() -> None:
    (batch, _) = matrix.packs()
    positions_only = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
    for name in ("llama", "stablelm", "bamba", "mamba2"):
        model = build(name, "thd").eval()
        assert torch.equal(model(**positions_only).logits, model(**batch.hf_kwargs()).logits)


@pytest.mark.parametrize("name", ["llama", "stablelm", "mamba2", "qwen3_next"])
def test_copies_and_pickles_keep_the_pack(name: str) -> None:
    model = build(name, "thd").eval()
    batch, _ = matrix.packs()
    want = model(**batch.hf_kwargs()).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**batch.hf_kwargs()).logits, want)


def test_generation_with_a_cache_is_refused_and_without_one_works() -> None:
    model = build("llama", "thd").eval()
    prompt = torch.arange(3, 9)[None]
    with pytest.raises(ValueError, match=r"cache through 'thd' is not possible"):
        model.generate(prompt, max_new_tokens=3, do_sample=False)  # type: ignore[operator]
    ours = model.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=False)  # type: ignore[operator]
    stock = build("llama", "eager").eval()
    theirs = stock.generate(prompt, max_new_tokens=3, do_sample=False)  # type: ignore[operator]
    assert torch.equal(ours, theirs)


def layers_of(model: torch.nn.Module) -> Any:
    return model.get_submodule("backbone").layers


@pytest.mark.parametrize("impl", list(CheckpointImpl))
def test_layers_in_a_checkpoint_wrapper_know_their_pack(impl: CheckpointImpl) -> None:
    model: Any = thd_model("mamba2").train()
    layers = layers_of(model)
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer, checkpoint_impl=impl)
    if impl is CheckpointImpl.REENTRANT:
        model.enable_input_require_grads()
    got = matrix.run_packed(model)
    plain = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in got.gradients.items()}
    matrix.assert_same(got._replace(gradients=plain), matrix.oracle("mamba2")[1], tolerance=1e-5)


def test_a_checkpoint_that_loses_the_pack_raises_in_backward() -> None:
    model = thd_model("mamba2").train()
    for layer in layers_of(model):
        by_hand = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
        layer.forward = by_hand
    with pytest.raises(
        RuntimeError, match="recomputed in backward and the boundaries of its pack are not known there"
    ):
        matrix.run_packed(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": torch.ones(1, 35)}, "LlamaForCausalLM got a pack and an attention_mask"),
        ({"use_cache": True}, r"got a pack and use_cache=True\. Generation with a cache through 'thd'"),
        ({"past_key_values": object()}, "got a pack and past_key_values"),
        ({"max_length_q": None}, "with cu_seq_lens_q but without max_length_q"),
        ({"position_ids": None}, "with cu_seq_lens_q but without position_ids"),
        ({"cu_seq_lens_q": [0, 35]}, "cu_seq_lens_q is list; wanted int32 offsets"),
        ({"cu_seq_lens_k": torch.tensor([[0, 35]])}, r"cu_seq_lens_k is torch.int64 of shape \(1, 2\)"),
        ({"cu_seq_lens_k": OTHER[:2]}, "cu_seq_lens_k is not cu_seq_lens_q"),
        ({"cu_seq_lens_k": OTHER}, "cu_seq_lens_k is not cu_seq_lens_q"),
        ({"input_ids": torch.ones(5, 7).long()}, r"one row, \[1, T\], but the input has shape \(5, 7\)"),
    ],
)
def test_calls_that_would_leak_are_refused(changes: dict[str, Any], message: str) -> None:
    model = build("llama", "thd")
    batch, _ = matrix.packs()
    with pytest.raises(ValueError, match=message):
        model(**{**batch.hf_kwargs(), **changes})
