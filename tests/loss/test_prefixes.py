"""Sequences that share prefixes have the loss, the gradients and the values of every sequence without."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks.families import build as build_tiny
from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.loss.causal_lm import causal_lm_logprobs, causal_lm_loss_and_stats
from lightning_thd.loss.preference import sequence_sums
from tests.models.families import FAMILIES, build, build_in_double
from tests.models.matrix import checkpoint
from tests.wide import nothing_narrower

TOLERANCE = 1e-9  # fp64 rounding of other orders of summation


def tree(
    seed: int, *, vocabulary: int = 60, labels: bool = True, weights: bool = True
) -> list[dict[str, Any]]:
    """Draw sequences that branch anywhere, among them duplicates, prefixes of others and strangers."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, vocabulary, int(rng.integers(1, 12)))]

    for _ in range(int(rng.integers(4, 9))):
        parent = rows[int(rng.integers(len(rows)))]
        held = parent[: int(rng.integers(0, len(parent) + 1))]
        rows.append(
            np.concatenate([held, rng.integers(3, vocabulary, int(rng.integers(0 if len(held) else 1, 8)))])
        )

    rows += [rows[0], rows[int(rng.integers(len(rows)))][:1]]
    samples: list[dict[str, Any]] = [{"input_ids": row} for row in rows]

    for sample in samples:
        ids = sample["input_ids"]
        if labels and rng.random() < 0.6:
            sample["labels"] = np.where(rng.random(len(ids)) < 0.5, -100, ids)
        if weights and rng.random() < 0.4:
            sample["weights"] = rng.random(len(ids)).astype(np.float32) if rng.random() < 0.5 else 0.3

    return samples


def distinct(samples: list[dict[str, Any]]) -> int:
    rows = [sample["input_ids"].tolist() for sample in samples]
    return len({tuple(row[: n + 1]) for row in rows for n in range(len(row))})


def measured(model: nn.Module, batch: THDBatch, **options: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = causal_lm_loss(model, batch, **options)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def largest_difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    scale = max(float(x.abs().max()) for x in wanted)
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) / scale


# Softcap and window, positions in a table, no keywords, sinks, MLA, experts, a selective scan, a convolution
# and a delta rule; the others are slow together.
QUICK = (
    *("gemma2", "gemma3", "opt", "stablelm", "gpt2", "gpt_oss", "deepseek_v3", "qwen3_moe"),
    *("mamba", "lfm2", "qwen3_next"),
)


@pytest.mark.filterwarnings("ignore:causal_lm_loss computes the logits of .*wide_to:UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in FAMILIES]
)
def test_loss_and_gradients_of_a_family(name: str) -> None:
    samples = tree(seed=sum(map(ord, name)))
    plain = THDBatch.collate(samples)
    shared = THDBatch.collate(samples, share_prefixes=True)
    assert shared.prefixes is not None
    assert shared.input_ids.shape[0] <= distinct(samples) < plain.input_ids.shape[0]
    model = build_in_double(name)
    with nothing_narrower():
        loss, gradients = measured(model, plain)
        same, summed = measured(model, shared)
    assert abs(float(same - loss)) <= TOLERANCE * float(loss)
    assert largest_difference(summed, gradients) <= TOLERANCE


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return build("llama", "thd").double()


def test_scales_of_queries_count_the_tokens_of_a_prefix() -> None:
    scales = {"floor_scale": 4, "no_rope_layers": [0, 1], "attention_chunk_size": 99}
    model = build_tiny("llama4_text", "Llama4ForCausalLM", "thd", scales).double()
    plain, shared = (THDBatch.collate(tree(3), share_prefixes=share, pad_to=99) for share in (False, True))
    torch.testing.assert_close(causal_lm_loss(model, shared), causal_lm_loss(model, plain))


@pytest.mark.parametrize("seed", range(6))
def test_values_of_every_sequence(llama: nn.Module, seed: int) -> None:
    samples = tree(seed)
    plain = THDBatch.collate(samples)
    shared = THDBatch.collate(samples, share_prefixes=True)

    for options in ({"reduction": "sequences"}, {"label_smoothing": 0.1, "z_loss": 0.01}):
        loss, gradients = measured(llama, plain, **options)
        same, summed = measured(llama, shared, **options)
        assert abs(float(same - loss)) <= TOLERANCE
        assert largest_difference(summed, gradients) <= 1e-6  # norms are in fp32

    for actual, expected in zip(
        causal_lm_logprobs(llama, shared), causal_lm_logprobs(llama, plain), strict=True
    ):
        assert torch.allclose(actual, expected, rtol=0, atol=1e-7)

    sums = [sequence_sums(causal_lm_logprobs(llama, batch).logp, batch) for batch in (shared, plain)]
    assert torch.allclose(*sums, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="its own loss would count the slots of a prefix only once"):
        llama(**shared.hf_kwargs(), labels=shared.input_ids[None])

    rows = [batch.unpack(llama(**batch.hf_kwargs()).logits) for batch in (shared, plain)]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-6)

    slots, targets, weights = shared.predictions
    assert len(set(zip(slots.tolist(), targets.tolist(), strict=True))) == len(slots)

    token_weights = 1.0 if plain.weights is None else plain.weights
    assert float(weights.sum()) == pytest.approx(float(((plain.targets != -100) * token_weights).sum()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gathers_again(reentrant: bool) -> None:
    samples = tree(3)
    plain = THDBatch.collate(samples)
    shared = THDBatch.collate(samples, share_prefixes=True)
    model = build("llama", "thd").double().train()
    with nothing_narrower():
        _, gradients = measured(model, plain)
        checkpoint(model, use_reentrant=reentrant)
        _, summed = measured(model, shared)
    assert largest_difference(summed, gradients) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_are_exact_and_their_graphs_bounded() -> None:
    model = build("gemma3", "thd").double().train()
    batches = [THDBatch.collate(tree(seed), share_prefixes=True) for seed in range(3, 8)]
    eager = [measured(model, batch) for batch in batches]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counter)
    graphs = []
    for batch, (loss, gradients) in zip(batches, eager, strict=True):
        same, summed = measured(model, batch)
        graphs.append(counter.frame_count)
        assert abs(float(same - loss)) <= TOLERANCE
        assert largest_difference(summed, gradients) <= TOLERANCE
    assert 0 < graphs[-1] == graphs[2]


def test_the_trees_hold_all_that_may_meet() -> None:
    """Without this the tests above could pass on trees that share hardly anything."""
    counts = Counter[str]()
    for seed in [sum(map(ord, name)) for name in QUICK]:
        samples = tree(seed)
        rows = [tuple(sample["input_ids"].tolist()) for sample in samples]
        shared = THDBatch.collate(samples, share_prefixes=True).prefixes
        begins = [[other for other in rows if other and row[: len(other)] == other != row] for row in rows]
        labels = [np.asarray(sample.get("labels", sample["input_ids"])) for sample in samples]
        counts["nested turns"] += any(len(set(each)) >= 2 for each in begins)
        counts["duplicates"] += len(set(rows)) < len(rows)
        counts["a prefix of another"] += any(begins)
        counts["no prefix"] += any(  # its first token is that of no other
            sum(other[0] == row[0] for other in rows) == 1 for row in rows
        )
        held = list(zip(labels, shared.prefix_lengths, strict=True))
        counts["labels inside"] += any((x[1:n] != -100).any() for x, n in held)
        counts["no labels inside"] += any(n > 1 and (x[1:n] == -100).any() for x, n in held)
        counts["weights"] += any("weights" in sample for sample in samples)

    assert min(counts.values()) >= 2, counts
    assert len(counts) == 7


def test_a_pad_at_the_end_and_fields_of_slots() -> None:
    samples = [{"input_ids": [5, 6, 7]}, {"input_ids": [5, 6, 8]}, {"input_ids": [9]}]
    batch = THDBatch.collate(samples, share_prefixes=True, pad_to=8)
    assert batch.input_ids.shape[0] == 8
    assert [row.tolist() for row in batch.unpack(batch.input_ids)] == [x["input_ids"] for x in samples]
    assert [row.tolist() for row in batch.unpack(batch.position_ids)] == [[0, 1, 2], [0, 1, 2], [0]]
    assert (batch.stats.real_tokens, batch.stats.shared_tokens, batch.stats.slots) == (5, 2, 8)
    assert batch.stats.sum_squares == 9 + 9 - 4 + 1
    for name in ("targets", "cu_seqlens", "padded_lengths", "max_seqlen"):
        with pytest.raises(ValueError, match=f"batch.{name} was read, but sequences of this batch share"):
            getattr(batch, name)
    nothing = THDBatch.collate(samples[1:], share_prefixes=True, pad_to=8)
    assert type(nothing) is THDBatch
    assert nothing.targets.tolist() == THDBatch.collate(samples[1:], pad_to=8).targets.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_token_stats_count_every_sequence(llama: nn.Module, seed: int) -> None:
    samples = tree(seed)
    samples.append({**samples[0], "weights": np.zeros(len(samples[0]["input_ids"]))})
    batches = [THDBatch.collate(samples, share_prefixes=share) for share in (False, True)]
    plain, shared = (causal_lm_loss_and_stats(llama, batch)[1] for batch in batches)
    assert torch.allclose(torch.stack(plain), torch.stack(shared), rtol=1e-6, atol=0)


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_pinning_and_moving_keep_a_batch(share_prefixes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[5, 6], [5, 7]]
    batch = THDBatch.collate([{"input_ids": row} for row in rows], share_prefixes=share_prefixes, pad_to=5)
    monkeypatch.setattr(type(batch), "_pin", lambda self: self._tensors())  # no CUDA here
    pinned = batch.pin_memory()
    assert [row.tolist() for row in pinned.unpack(pinned.input_ids)] == rows
    assert {x.device.type for x in pinned.to("meta")._tensors().values()} == {"meta"}


def test_fabric_converts_inputs_of_a_shared_batch() -> None:
    batch = THDBatch.collate([{"input_ids": [5, 6]}, {"input_ids": [5, 7]}], share_prefixes=True)
    model = build("llama", "thd")
    expected = float(causal_lm_loss(model.double(), batch).detach())
    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
    loss = causal_lm_loss(fabric.setup(model), batch).detach()
    assert float(loss) == pytest.approx(expected, rel=1e-9)


def test_values_of_slots_or_of_tokens_are_not_guessed() -> None:
    samples = [{"input_ids": [5, 6]}, {"input_ids": [5, 7]}]
    batch = THDBatch.collate(samples, share_prefixes=True, pad_to=4)
    assert [row.tolist() for row in batch.unpack(batch.input_ids[None])] == [[5, 6], [5, 7]]
    with pytest.raises(ValueError, match="padding made slots and tokens equally many"):
        batch.unpack(torch.arange(4))


def test_another_attention_refuses_shared_prefixes(llama: nn.Module) -> None:
    batch = THDBatch.collate([{"input_ids": [5, 6]}, {"input_ids": [5, 7]}], share_prefixes=True)
    with pytest.raises(
        ValueError, match='share prefixes, and a model without "thd" got it, which cannot share them'
    ):
        build("llama", "eager")(**batch.hf_kwargs())
