from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.flops import FlopsModel, SeqStats
from lightning_thd.flops.torch_counter import StepCounter, counted
from lightning_thd.warnings import MeasureWarning
from tests.device_reads import ON_GPU
from tests.tiny import sequences, tiny_llama


@contextmanager
def running(counter: StepCounter) -> Iterator[None]:
    counter.start()
    try:
        yield
    finally:
        counter.stop()


def test_counts_a_step_and_scales_it_with_the_slots() -> None:
    net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
    inputs = torch.randn(10, 8, requires_grad=True)
    step = lambda: net(inputs).sum().backward()  # noqa: E731
    model = FlopsModel.from_module(net, step, stats=SeqStats.from_lengths([10]))
    per_token = 6 * 2 * 8 * 24
    assert model.training_flops(SeqStats.from_lengths([10])).model == 10 * per_token
    padded = model.training_flops(SeqStats.from_lengths([20], slots=30))
    assert padded.model == 30 * per_token


def test_a_decoder_longer_than_the_batch_counts_all_its_pairs() -> None:
    q = torch.randn(2, 1, 16, 8, requires_grad=True)
    weight = torch.randn(8, 8, requires_grad=True)

    def step() -> None:
        nn.functional.scaled_dot_product_attention(q @ weight, q, q).sum().backward()

    encoder = SeqStats.from_lengths([4, 4])
    model = replace(FlopsModel.from_module(nn.Identity(), step, stats=encoder), causal="full")
    assert model.training_flops(encoder).attention == pytest.approx(3 * 4 * 8 * 2 * 16**2, rel=1e-9)


def test_grouped_products_count_every_row_once() -> None:
    """torch's counter has no formula for them: a mixture of experts would count as its attention alone."""
    rows = 12
    inner = 16
    out = 24
    groups = 3
    hidden = torch.randn(rows, inner, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(groups, inner, out, dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([4, 5, 12], dtype=torch.int32)

    def step() -> None:
        nn.functional.grouped_mm(hidden, weight, offs=offsets).square().sum().backward()

    model = FlopsModel.from_module(nn.Identity(), step, stats=SeqStats.from_lengths([rows]))
    assert model.training_flops(SeqStats.from_lengths([rows])).model == 3 * 2 * rows * inner * out


def test_experts_that_transformers_groups_are_counted() -> None:
    """Most of the model is experts, run by transformers' grouped products on a CPU."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = MixtralForCausalLM._from_config(config, experts_implementation="grouped_mm").train()
    ids = torch.arange(16)[None] % 64

    def step() -> None:
        model(input_ids=ids, use_cache=False).logits.sum().backward()

    counted = FlopsModel.from_module(model, step, stats=SeqStats.from_lengths([16]))
    experts = 2 * 2 * 3 * 32 * 48  # layers, experts of a token, products
    dense = sum(child.weight.numel() for child in model.modules() if isinstance(child, nn.Linear))
    flops = counted.training_flops(SeqStats.from_lengths([16]))
    assert flops.linear == pytest.approx(6 * 16 * (experts + dense), rel=0.02)
    assert flops.attention > 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_missing_with_a_warning() -> None:
    """Its pairs are in a mask function. It is compiled, as its users do, and runs uncompiled here."""
    from torch.nn.attention.flex_attention import flex_attention

    flex = torch.compile(flex_attention, backend="aot_eager")
    rows = torch.randn(1, 2, 16, 16)  # without gradients: torch has none of this function on a CPU
    weight = nn.Parameter(torch.randn(16, 16))
    stats = SeqStats.from_lengths([32])

    def step() -> None:
        (flex(rows, rows, rows) @ weight).sum().backward()

    with pytest.warns(MeasureWarning, match="too few: torch has no formula for flex_attention"):
        flops = FlopsModel.from_module(nn.Identity(), step, stats=stats).training_flops(stats)
    assert flops.model == 2 * 2 * 32 * 16 * 16  # forward, and the gradient of the weight


def test_attention_on_a_cpu_counts_forward_once_and_backward_twice() -> None:
    heads = 2
    size = 16
    total = 32
    qkv = [torch.randn(1, heads, total, size, requires_grad=True) for _ in range(3)]
    weight = torch.randn(size, size)

    def step() -> None:
        out = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        (out @ weight).sum().backward()

    stats = SeqStats.from_lengths([total])
    flops = FlopsModel.from_module(nn.Identity(), step, stats=stats).training_flops(stats)
    assert flops.attention == 3 * 2 * heads * 2 * size * total**2 // 2


def test_attention_on_a_batch_that_ran_before_is_counted() -> None:
    """Layers share the attention of a batch, which a step without a counter has chosen."""
    model = tiny_llama()
    batch = THDBatch.collate(sequences(3, labels=True))

    def attention_calls() -> list[tuple[int, int]]:
        counter = StepCounter(model)
        with running(counter):
            causal_lm_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        return [(call.forward, call.backward) for call in counter.calls]

    causal_lm_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    size = model.config.num_attention_heads * model.config.head_dim
    expected = [(4 * size, 8 * size)] * model.config.num_hidden_layers
    assert attention_calls() == expected
    causal_lm_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    assert attention_calls() == expected


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("counted_pass", ["forward", "backward"])
def test_a_counter_of_one_pass_changes_nothing_in_a_checkpointed_layer(
    device: str, counted_pass: str
) -> None:
    """A checkpoint compares what a layer saves in both passes, so a counter may not choose another kernel."""
    model = tiny_llama(torch.float32).bfloat16().to(device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = THDBatch.collate(sequences(3, labels=True)).to(device)
    counter = StepCounter(model)

    def counting(name: str) -> AbstractContextManager[Any]:
        return running(counter) if name == counted_pass else nullcontext()

    with counting("forward"):
        loss = causal_lm_loss(model, batch)
    with counting("backward"):
        loss.backward()  # type: ignore[no-untyped-call]
    assert len(counter.calls) == model.config.num_hidden_layers
    assert all(bool(call.again) == (counted_pass == "backward") for call in counter.calls)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_fused_loss_counts_its_gradients_once_however_often_they_are_computed(passes: int) -> None:
    from lightning_thd.loss import fused_linear_cross_entropy

    tokens = 16
    size = 8
    vocabulary = 32
    hidden = torch.randn(tokens, size, requires_grad=True)
    weight = nn.Parameter(torch.randn(vocabulary, size))
    targets = torch.randint(0, vocabulary, (tokens,))

    def step() -> None:
        loss = fused_linear_cross_entropy(hidden, weight, targets)
        for _ in range(passes):
            loss.backward(retain_graph=True)

    stats = SeqStats.from_lengths([tokens])
    model = FlopsModel.from_module(nn.Identity(), step, stats=stats)
    assert model.training_flops(stats).linear == 3 * 2 * tokens * size * vocabulary


def test_our_cpu_kernel_counts_its_sequences_and_not_the_pack() -> None:
    from lightning_thd import varlen_attention

    heads = 2
    size = 16
    lengths = [20, 12]
    qkv = [torch.randn(32, heads, size, requires_grad=True) for _ in range(3)]
    cu = torch.tensor([0, 20, 32], dtype=torch.int32)
    weight = torch.randn(size, size)

    def step() -> None:
        out = varlen_attention(*qkv, cu, cu, 20, 20, backend="cpu")
        (out @ weight).sum().backward()

    stats = SeqStats.from_lengths(lengths)
    flops = FlopsModel.from_module(nn.Identity(), step, stats=stats).training_flops(stats)
    assert flops.attention == 3 * 2 * heads * 2 * size * sum(n * n for n in lengths) // 2


WEIGHTS = [nn.Parameter(torch.eye(6) * (1 + i)) for i in range(3)]


def layer(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Multiply rows by a weight, and by each other, which calls of all layers do alike."""
    keys = torch.nn.functional.linear(rows, weight)
    return rows + (keys @ keys.T) @ rows / rows.numel()


def flops_of_layers(kinds: Sequence[str], *, passes_before: int = 0) -> tuple[int, int, int]:
    """Count a step of layers that are "plain", or checkpointed as "reentrant" or "other"."""

    def run() -> torch.Tensor:
        rows = torch.ones(4, 6, requires_grad=True)
        for kind, weight in zip(kinds, WEIGHTS, strict=True):
            if kind == "plain":
                rows = layer(weight, rows)
            else:
                rows = checkpoint(partial(layer, weight), rows, use_reentrant=kind == "reentrant")
        return rows.sum()

    counter = StepCounter()
    counter.start()
    try:
        with torch.no_grad():
            for _ in range(passes_before):
                run()
        run().backward()
    finally:
        counter.stop()
    return counted(counter, [SeqStats.from_lengths([4])], [1]).flops


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the passes before
@pytest.mark.parametrize(
    "kinds", [*itertools.product(("plain", "reentrant", "other"), repeat=3)], ids="-".join
)
def test_checkpointed_layers_count_each_product_once(kinds: Sequence[str]) -> None:
    product = 2 * 4 * 4 * 6  # of keys by keys, and of their scores by rows
    of_layer = 2 * 4 * 6 * 6 + 2 * product
    forward = 3 * of_layer
    # torch's non-reentrant checkpoint stops before the last product, whose result nothing saved needs.
    again = sum({"plain": 0, "reentrant": of_layer, "other": of_layer - product}[kind] for kind in kinds)
    assert flops_of_layers(kinds) == (forward, 2 * forward, again)
    assert flops_of_layers(kinds, passes_before=2) == (3 * forward, 2 * forward, again)
