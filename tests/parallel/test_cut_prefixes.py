"""Ranks that share a pack of shared prefixes give the loss and gradients of all sequences, unpacked."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.families import build as build_tiny
from lightning_thd import THDBatch, varlen_attention
from lightning_thd.alignment import Alignment, Layout
from lightning_thd.loss.causal_lm import causal_lm_logprobs
from lightning_thd.parallel.context.cut_prefixes import cut_leaves
from lightning_thd.parallel.shard import shard_batch
from tests.loss.test_prefixes import TOLERANCE, largest_difference, measured, tree
from tests.models.families import build, build_in_double
from tests.ranks import run_ranks
from tests.wide import nothing_narrower

LAYOUTS: tuple[Layout, ...] = ("contiguous", "dual_chunk")
# Plain, softcap and windows, sinks, latent attention, experts, a delta rule, a selective scan.
FAMILIES = ("llama", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe", "qwen3_next", "mamba")
OPTIONS: dict[str, dict[str, Any]] = {"gemma2": {"reduction": "sequences"}}
# Scales of queries, and positions in a table, count from a sequence's first token, wherever it is.
BY_POSITION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama4": (
        "llama4_text",
        "Llama4ForCausalLM",
        {"floor_scale": 4, "no_rope_layers": [0, 1], "attention_chunk_size": 99},
    ),
    "roberta": ("roberta", "RobertaForCausalLM", {"is_decoder": True, "pad_token_id": 5}),
}


def model_of(family: str) -> Any:
    if family not in BY_POSITION:
        return build_in_double(family)
    kind, name, changes = BY_POSITION[family]
    return build_tiny(kind, name, "thd", changes).double()


def compare(
    families: tuple[str, ...], layouts: tuple[Layout, ...], share_prefixes: bool = True
) -> dict[tuple[str, str], list[float]]:
    """Return the errors of the loss and of the gradients of every family and layout."""
    warnings.filterwarnings("ignore")
    group: Any = dist.group.WORLD
    cp = group.size()
    errors = {}

    for family in families:
        samples = tree(seed=sum(map(ord, family)) % 7)
        options = OPTIONS.get(family, {})
        for layout in layouts:
            align = Alignment.for_(cp=cp, layout=layout)
            batch = THDBatch.collate(samples, align=align, share_prefixes=share_prefixes)
            with nothing_narrower():
                loss, expected = measured(model_of(family), THDBatch.collate(samples), **options)
                part = shard_batch(batch, group=group, layout=layout)
                model = model_of(family)
                shard_loss, _ = measured(model, part, **options)
            gradients = []
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    continue
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(gradient)
                gradients.append(gradient / cp)
            kept = [grad for grad in gradients if grad.abs().max() > 0]
            errors[family, layout] = [
                abs(float(shard_loss - loss)) / float(loss),
                largest_difference(kept, [grad for grad in expected if grad.abs().max() > 0]),
            ]

    return errors


@pytest.mark.parametrize(
    ("cp", "families"),
    [(2, FAMILIES[:1]), *(pytest.param(cp, FAMILIES, marks=pytest.mark.slow) for cp in (2, 4))],
)
def test_loss_and_gradients_equal_one_process_on_every_sequence(cp: int, families: tuple[str, ...]) -> None:
    for errors in run_ranks(compare, cp, families, LAYOUTS):
        assert len(errors) == len(families) * len(LAYOUTS)
        for case, of_case in errors.items():
            assert max(of_case) <= TOLERANCE, (case, of_case)


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_positions_count_from_tokens_on_other_ranks(share_prefixes: bool) -> None:
    families = tuple(BY_POSITION)
    for errors in run_ranks(compare, 2, families, LAYOUTS, share_prefixes):
        assert len(errors) == len(families) * len(LAYOUTS)
        for case, largest in errors.items():
            assert max(largest) <= TOLERANCE, (case, largest)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_slot_and_prediction_is_on_one_rank(layout: Layout, cp: int, seed: int) -> None:
    align = Alignment.for_(cp=cp, layout=layout)
    whole = THDBatch.collate(tree(seed), align=align, share_prefixes=True)
    parts = [shard_batch(whole, group=None, cp=cp, rank=rank, layout=layout) for rank in range(cp)]
    predictions = []

    for part in parts:
        mine = part.boundaries.layout.own
        rows = part.predictions
        predictions += zip(
            mine[rows.slots].tolist(), rows.targets.tolist(), rows.weights.tolist(), strict=True
        )
        assert torch.equal(part.boundaries.positions, whole.boundaries.positions[mine])
        assert torch.equal(part.input_ids[part.prefixes.token_slots][part.prefixes.here],
                           whole.input_ids[whole.prefixes.token_slots][part.prefixes.here])  # fmt: skip

    expected = whole.predictions
    assert sorted(row for row in predictions if row[1] != -100) == [
        (slot, target, pytest.approx(weight))
        for slot, target, weight in zip(*(x.tolist() for x in expected), strict=True)
        if target != -100
    ]

    here = torch.stack([part.prefixes.here for part in parts])
    assert torch.equal(here.sum(0), torch.ones(sum(whole.lengths), dtype=torch.int64))


@pytest.mark.parametrize("left", [-1, 0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_queries_see_the_keys_of_their_path_in_the_window(layout: Layout, left: int) -> None:
    """Beside a table that is made by walking up the tree from every slot."""
    cp = 2
    whole = THDBatch.collate(tree(2), align=Alignment.for_(cp=cp), share_prefixes=True)
    prefixes = whole.prefixes
    shown = {}

    for path, queries in zip(
        torch.split(prefixes.keys, list(prefixes.key_lengths)), prefixes.query_lengths, strict=True
    ):
        for i in range(len(path) - queries, len(path)):
            first = 0 if left < 0 else max(0, i - left)
            shown[int(path[i])] = path[first : i + 1].tolist()

    order = [shard_batch(whole, group=None, cp=cp, rank=r, layout=layout) for r in range(cp)]
    gathered = torch.cat([part.boundaries.layout.own for part in order])

    for part in order:
        call = part.boundaries.layout.call(causal=True, left=left)
        keys = gathered[call.keys]
        slot = iter(part.boundaries.layout.own.tolist())
        offsets = zip(
            call.cu_seqlens_q.diff().tolist(), torch.split(keys, list(call.kv_lengths)), strict=True
        )
        for queries, seen in offsets:
            for i in range(queries):
                row = seen[: len(seen) - queries + 1 + i]
                row = row if left < 0 else row[-left - 1 :]
                assert row.tolist() == shown[next(slot)]


def test_leaves_are_cut_by_stretches_of_the_row() -> None:
    first, second = (cut_leaves((3, 5), cp=2, rank=r, layout="contiguous") for r in range(2))
    assert [part.tolist() for part in first] == [[0, 1], [0, 0], [3, 1]]
    assert [part.tolist() for part in second] == [[1], [1], [5]]


def test_log_probabilities_and_fields_of_a_shard_are_refused() -> None:
    batch = THDBatch.collate(tree(1), align=Alignment.for_(cp=2), share_prefixes=True)
    part = shard_batch(batch, group=None, cp=2, rank=0)
    with pytest.raises(ValueError, match="causal_lm_logprobs got one rank's shard of a pack whose sequences"):
        causal_lm_logprobs(build("llama", "thd"), part)
    for name in ("targets", "cu_seqlens", "padded_lengths", "max_seqlen"):
        with pytest.raises(ValueError, match=f"batch.{name} was read, but sequences of this batch share"):
            getattr(part, name)
    q = torch.zeros(part.boundaries.slots, 2, 4)
    with pytest.raises(ValueError, match="share prefixes, and lets tokens see later tokens"):
        varlen_attention(q, q, q, part.boundaries, causal=False)


def gathered() -> list[list[int]]:
    group: Any = dist.group.WORLD
    batch = THDBatch.collate(tree(3), align=Alignment.for_(cp=2), share_prefixes=True)
    part = shard_batch(batch, group=group)
    return [row.tolist() for row in part.unpack(part.input_ids)]


def test_unpack_gathers_the_slots_of_all_ranks() -> None:
    expected = [np.asarray(sample["input_ids"]).tolist() for sample in tree(3)]
    assert run_ranks(gathered, 2) == [expected, expected]


def test_a_step_is_cut_without_reading_a_device() -> None:
    batch = THDBatch.collate(tree(3), align=Alignment.for_(cp=2), share_prefixes=True)
    part = shard_batch(batch.to("meta"), group=None, cp=2, rank=1)  # which has no values to read
    part.boundaries.layout.call(causal=True, left=-1)
    assert part.prefixes.slots.is_meta
