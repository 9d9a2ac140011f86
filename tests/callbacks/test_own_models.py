"""FLOPs of models without a config: exact for any order of packs, and none that no sequence needs.

T slots, D features, H heads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_thd import FlopsModel, THDBatch, varlen_attention
from lightning_thd.callbacks import THDThroughputMonitor
from lightning_thd.flops import SeqStats
from lightning_thd.warnings import MeasureWarning
from tests.callbacks.own_models import Own
from tests.callbacks.own_models import packs as random_packs

ORDERS = 5


def counted_and_brute(seed: int, order: int) -> tuple[float, int]:
    """Train a random model on packs in some order; return its total FLOPs as logged and as counted."""
    model = Own(seed)
    batches = random_packs(seed, 12)  # more than are counted
    random.Random(order).shuffle(batches[1:] if order == 0 else batches)
    monitor = THDThroughputMonitor(peak=1e12, causal="exact", every_n_steps=2)
    monitor.watch(model)
    for batch in batches:
        with monitor.step(batch):
            model(batch).backward()
    total = monitor.finish()["train/total_flops"]
    return total, sum(model.count(batch.lengths) for batch in batches)


@pytest.mark.parametrize("seed", [0, 3, 7, 12])
def test_random_models_count_exactly(seed: int) -> None:
    for order in range(2):
        total, brute = counted_and_brute(seed, order)
        # These models are so small that the rounding to whole FLOPs, once a step, shows beside 1e-6.
        assert total == pytest.approx(brute, rel=1e-6, abs=2), (seed, order)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_every_random_model_counts_exactly_in_every_order(seed: int) -> None:
    for order in range(ORDERS):
        total, brute = counted_and_brute(seed, order)
        # These models are so small that the rounding to whole FLOPs, once a step, shows beside 1e-6.
        assert total == pytest.approx(brute, rel=1e-6, abs=2), (seed, order)


D = 8
VOCAB = 16
_LINEAR = 3 * D * D + D * D  # weights of a block


class Block(nn.Module):
    """Attention over a pack and an output projection; ``how`` is the attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.score = nn.Linear(D // 2, 1, bias=False)  # of additive attention

    def forward(self, x: Tensor, batch: THDBatch) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)) for each in self.qkv(x).chunk(3, -1))
        if self.how == "varlen":
            mixed = varlen_attention(q, k, v, batch.boundaries)
        else:
            number = (batch.position_ids == 0).cumsum(0)
            rows = [each.transpose(0, 1)[None] for each in (q, k, v)]
            mask = (number[:, None] == number).tril()
            if self.how == "torch over the row":  # documents see each other
                mixed = F.scaled_dot_product_attention(*rows, is_causal=True)[0].transpose(0, 1)
            elif self.how == "torch with a mask":
                mixed = F.scaled_dot_product_attention(*rows, attn_mask=mask)[0].transpose(0, 1)
            elif self.how == "einsum":
                scores = torch.einsum("qhd,khd->hqk", q, k)
                weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
                mixed = torch.einsum("hqk,khd->qhd", weights, v)
            elif self.how == "einsum of lists":
                heads = zip(q.unbind(1), k.unbind(1), strict=True)
                scores = torch.stack([torch.einsum(one, [0, 2], other, [1, 2]) for one, other in heads])
                weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
                mixed = torch.einsum("hqk,khd->qhd", [weights, v])
            elif self.how == "linear":
                scores = torch.stack([F.linear(q[:, head], k[:, head]) for head in range(2)])
                weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
                mixed = torch.stack([F.linear(weights[head], v[:, head].T) for head in range(2)], 1)
            elif self.how == "additive":
                scores = self.score(torch.tanh(q[:, None] + k[None]))[..., 0].permute(2, 0, 1)
                weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
                mixed = torch.einsum("hqk,khd->qhd", weights, v)
            elif self.how == "elementwise":
                scores = (q[:, None] * k[None]).sum(-1).permute(2, 0, 1)
                weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
                mixed = (weights @ v.transpose(0, 1)).transpose(0, 1)
            else:
                scores = q.transpose(0, 1) @ k.permute(1, 2, 0)
                weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
                mixed = (weights @ v.transpose(0, 1)).transpose(0, 1)
        return x + self.out(mixed.flatten(1))


class Gpt(nn.Module):
    """Two blocks and a head; ``around`` calls the first block."""

    def __init__(self, how: str = "varlen", around: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.around = around
        self.tokens = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList([Block(how), Block(how)])
        self.head = nn.Linear(D, VOCAB, bias=False)

    def forward(self, batch: THDBatch) -> Tensor:
        x = self.tokens(batch.input_ids)
        first, second = self.blocks
        x = first(x, batch) if self.around is None else self.around(first, x, batch)
        return self.head(second(x, batch)).logsumexp(-1).sum()


def pack(*lengths: int) -> THDBatch:
    return THDBatch.collate([{"input_ids": [1 + i % 15 for i in range(n)]} for n in lengths])


def metrics_of(
    model: nn.Module, batches: Sequence[Any], call: Callable[..., Any] | None = None, **options: Any
) -> dict[str, float]:
    """Train on batches, and return the metrics of all steps."""
    monitor = THDThroughputMonitor(peak=1e9, warmup_steps=0, every_n_steps=100, **options)
    monitor.watch(model)
    for batch in batches:
        with monitor.step(batch):
            (call or model)(batch).backward()
    return monitor.finish()


def pairs(lengths: Sequence[int]) -> float:
    """Return half of the squares, as many query-key pairs as the monitor counts by default."""
    return sum(n * n for n in lengths) / 2


PACKS = [(5, 9, 2), (7, 3), (4, 4, 6, 1), (10, 2)]
# Without early stop, torch runs the whole block again; with it, all but the last product, the projection.
WHOLE = partial(checkpoint, use_reentrant=False, early_stop=False)
EARLY = partial(checkpoint, use_reentrant=False)
REENTRANT = partial(checkpoint, use_reentrant=True)


def by_hand(lengths: Sequence[int]) -> tuple[float, float]:
    """Return the forward FLOPs of a pack in one block, and in the whole model."""
    tokens = sum(lengths)
    block = 2 * tokens * _LINEAR + 4 * D * pairs(lengths)
    return block, 2 * block + 2 * tokens * D * VOCAB


@pytest.mark.parametrize(("around", "skipped"), [(WHOLE, 0), (REENTRANT, 0), (EARLY, D * D)])
@pytest.mark.parametrize("recompute", ["auto", "full"])
def test_hfu_counts_the_forward_of_a_checkpointed_block_once_more(
    around: Callable[..., Tensor], skipped: int, recompute: Any
) -> None:
    metrics = metrics_of(Gpt(around=around), [pack(*each) for each in PACKS], recompute=recompute)
    again = sum(by_hand(each)[0] - 2 * sum(each) * skipped for each in PACKS)
    model = 3 * sum(by_hand(each)[1] for each in PACKS)
    assert metrics["train/total_flops"] == pytest.approx(model)
    # The rates leave out the two counted steps.
    rated = PACKS[2:]
    again = sum(by_hand(each)[0] - 2 * sum(each) * skipped for each in rated)
    model = 3 * sum(by_hand(each)[1] for each in rated)
    ratio = metrics["train/device/hfu"] / metrics["train/device/mfu"]
    assert ratio == pytest.approx((model + again) / model, rel=1e-9)


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ("auto", lambda n: 0),
        ("none", lambda n: 0),
        ("full", lambda n: by_hand(n)[1]),
        ("selective", lambda n: 2 * 4 * D * pairs(n)),
    ],
)
def test_a_policy_adds_forwards_that_no_step_shows(
    recompute: Any, again: Callable[[Sequence[int]], float]
) -> None:
    metrics = metrics_of(Gpt(), [pack(*each) for each in PACKS], recompute=recompute)
    rated = PACKS[2:]
    model = 3 * sum(by_hand(each)[1] for each in rated)
    ratio = metrics["train/device/hfu"] / metrics["train/device/mfu"]
    assert ratio == pytest.approx((model + sum(map(again, rated))) / model, rel=1e-9)


def test_attention_of_torch_over_a_whole_pack_is_warned_of_once() -> None:
    """With a mask of documents, and over a pack of one document and a pad, it is right."""
    batches = [pack(*each) for each in PACKS]
    with pytest.warns(MeasureWarning, match=r"of Gpt ran over all 16 slots of a pack of 3 seq") as warnings:
        metrics_of(Gpt("torch over the row"), batches)
    assert len(warnings) == 1
    metrics_of(Gpt("torch with a mask"), batches)
    one = THDBatch.collate([{"input_ids": [1, 2, 3]}], pad_to=8)
    metrics_of(Gpt("torch over the row"), [one])


def test_the_policy_none_counts_no_repetition() -> None:
    metrics = metrics_of(Gpt(around=WHOLE), [pack(*each) for each in PACKS], recompute="none")
    assert metrics["train/device/hfu"] == metrics["train/device/mfu"]


def test_a_policy_holds_for_a_flops_model_that_the_user_gives() -> None:
    batch = pack(*PACKS[0])
    model = Gpt()
    given = FlopsModel.from_module(model, lambda: model(batch).backward(), stats=batch.stats)
    metrics = metrics_of(model, [batch] * 2, flops_model=given, recompute="full")
    assert metrics["train/device/hfu"] == pytest.approx(metrics["train/device/mfu"] * 4 / 3)


def test_from_module_counts_what_a_checkpoint_repeats() -> None:
    batch = pack(*PACKS[0])
    model = Gpt(around=WHOLE)
    flops = FlopsModel.from_module(model, lambda: model(batch).backward(), stats=batch.stats)
    block, whole = by_hand(PACKS[0])
    assert flops.training_flops(batch.stats).recompute == block
    assert flops.training_flops(batch.stats).model == 3 * whole


def written_by_hand(lengths: Sequence[int], computed: float | None = None) -> float:
    """Return training FLOPs of ``Gpt`` with ``computed`` pairs a layer; None means those of sequences."""
    tokens = sum(lengths)
    wanted = pairs(lengths) if computed is None else computed
    return 3 * (2 * (2 * tokens * _LINEAR + 4 * D * wanted) + 2 * tokens * D * VOCAB)


@pytest.mark.parametrize("how", ["einsum", "matmul"])
@pytest.mark.parametrize("packs", [PACKS, [(5, 9, 2), (8, 8), (4, 4, 6, 2), (10, 6)]], ids=["any", "16"])
def test_pairs_that_a_mask_hides_are_no_model_flops(how: str, packs: Sequence[Sequence[int]]) -> None:
    times = written_by_hand(packs[0], 16 * 16) / written_by_hand(packs[0])
    message = rf"device/mfu.*not logged.*would be {times:.2f} times too high: {how} multiplies all 16 x 16"
    with pytest.warns(MeasureWarning, match=message) as warned:
        metrics = metrics_of(Gpt(how), [pack(*each) for each in packs])
    assert "varlen_attention(q, k, v, batch.boundaries)" in str(warned[0].message)
    for key in ("device/mfu", "device/tflops_per_gpu", "device/flops_per_sec", "total_flops"):
        assert f"train/{key}" not in metrics
    assert "train/packing/attention_fraction" not in metrics
    # The device computes all pairs. The rates leave out the steps that are counted to find that they differ.
    rated = packs[3:] if packs is PACKS else packs[2:]
    hardware = sum(written_by_hand(each, sum(each) ** 2) for each in rated)
    per_sec = metrics["train/device/hfu"] * 1e9 / metrics["train/device/items_per_sec"]
    assert per_sec == pytest.approx(hardware / sum(map(sum, rated)))


def test_scores_of_lists_of_indices_and_of_linear_layers_are_products_too() -> None:
    for how, name in (("einsum of lists", "einsum"), ("linear", "linear")):
        times = written_by_hand(PACKS[0], 16 * 16) / written_by_hand(PACKS[0])
        with pytest.warns(MeasureWarning, match=f"would be {times:.2f} times too high: {name} multiplies"):
            metrics = metrics_of(Gpt(how), [pack(*each) for each in PACKS])
        assert "train/device/mfu" not in metrics


@pytest.mark.parametrize(("how", "products"), [("additive", 2), ("elementwise", 1)])
def test_pairs_whose_scores_are_no_product_of_queries_and_keys_are_found(how: str, products: int) -> None:
    """Additive scores multiply a vector for each pair by a weight; elementwise ones multiply no matrices."""
    lengths = PACKS[0]
    both = [written_by_hand(lengths, products * computed / 2) for computed in (16 * 16, pairs(lengths))]
    names = {"additive": "einsum, linear multiply", "elementwise": "matmul multiplies"}[how]
    message = f"would be {both[0] / both[1]:.2f} times too high: {names} all 16 x 16"
    with pytest.warns(MeasureWarning, match=message):
        metrics = metrics_of(Gpt(how), [pack(*each) for each in PACKS])
    assert "train/device/mfu" not in metrics


def test_padded_rows_written_by_hand_are_compared_with_their_lengths() -> None:
    lengths = (6, 2, 3)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    batch = {"input_ids": mask.long(), "attention_mask": mask.long()}
    model = Gpt("varlen")

    def step(batch: dict[str, Tensor]) -> Tensor:
        x = model.tokens(batch["input_ids"])
        for block in model.blocks:
            q, k, v = block.qkv(x).chunk(3, -1)
            scores = (q @ k.mT).masked_fill(~batch["attention_mask"].bool()[:, None], -torch.inf)
            x = x + block.out(scores.softmax(-1) @ v)
        return model.head(x).logsumexp(-1).sum()

    # Of each real query, all 6 keys were counted.
    times = written_by_hand(lengths, sum(lengths) * 6) / written_by_hand(lengths)
    with pytest.warns(MeasureWarning, match=rf"would be {times:.2f} times too high: matmul.* 6 x 6 slots"):
        metrics = metrics_of(model, [batch] * 3, step)
    assert "train/device/mfu" not in metrics
    assert metrics["train/device/hfu"] > 0


def test_torchs_attention_layer_counts_the_pairs_of_each_row() -> None:
    lengths = (6, 2, 3)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    batch = {"input_ids": mask.long(), "attention_mask": mask.long()}
    tokens, layer = nn.Embedding(2, D), nn.MultiheadAttention(D, 2, batch_first=True)

    def step(batch: dict[str, Tensor]) -> Tensor:
        x = tokens(batch["input_ids"])
        return layer(x, x, x, key_padding_mask=~batch["attention_mask"].bool())[0].sum()

    metrics = metrics_of(nn.ModuleList([tokens, layer]), [batch] * 3, step)
    attention = 3 * 4 * D * pairs(lengths)
    assert metrics["train/total_flops"] == 3 * (3 * 2 * sum(lengths) * _LINEAR + attention)
    assert metrics["train/packing/attention_fraction"] * metrics["train/total_flops"] == 3 * attention


def test_one_sequence_written_by_hand_has_all_its_pairs() -> None:
    metrics = metrics_of(Gpt("einsum"), [pack(16)] * 3)
    assert metrics["train/total_flops"] == 3 * written_by_hand([16], 16 * 16)


class Wide(nn.Module):
    """Layers of as many features as the packs have slots, whose weights are parameters or made of some."""

    def __init__(self, weight: Callable[[Tensor], Tensor], slots: int) -> None:
        super().__init__()
        self.weight_of = weight
        self.tokens = nn.Embedding(VOCAB, slots)
        self.up = nn.Parameter(torch.eye(slots))

    def forward(self, batch: THDBatch) -> Tensor:
        x = self.tokens(batch.input_ids)
        x = (x @ self.weight_of(self.up)).softmax(-1)
        return torch.einsum("td,de->te", x, self.weight_of(self.up)).sum()


@pytest.mark.parametrize("weight", [lambda w: w, lambda w: w.double().float(), lambda w: w.T], ids=range(3))
@pytest.mark.parametrize("packs", [PACKS, [(5, 9, 2), (8, 8), (4, 4, 6, 2)]], ids=["any", "16"])
def test_as_many_features_as_slots_are_no_pairs(
    weight: Callable[[Tensor], Tensor], packs: Sequence[Sequence[int]]
) -> None:
    metrics = metrics_of(Wide(weight, 16), [pack(*each) for each in packs])
    assert metrics["train/total_flops"] == sum(2 * 6 * sum(each) * 16 * 16 for each in packs)


def test_alike_sizes_of_one_step_are_cleared_by_a_step_of_another_length() -> None:
    class Made(Wide):
        """Its weight is made of an input, so that one step cannot tell it from keys."""

        def forward(self, batch: THDBatch) -> Tensor:
            made = torch.ones(16, 16, requires_grad=True) * self.up
            return (self.tokens(batch.input_ids) @ made).sum()

    with pytest.warns(MeasureWarning, match="times too high"):
        metrics = metrics_of(Made(lambda w: w, 16), [pack(*each) for each in PACKS])
    assert metrics["train/total_flops"] == sum(6 * sum(each) * 16 * 16 for each in PACKS)


def test_from_module_says_that_pairs_are_hidden() -> None:
    batch = pack(5, 9, 2)
    model = Gpt("einsum")
    with pytest.warns(MeasureWarning, match=r"FLOPs of Gpt are .* times too high: einsum"):
        FlopsModel.from_module(model, lambda: model(batch).backward(), stats=SeqStats.from_lengths([5, 9, 2]))
