"""A replayed step equals the eager one: losses, gradients, and every reason to run eagerly."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd._static import static_shapes
from lightning_thd.callbacks import THDThroughputMonitor
from lightning_thd.callbacks.cuda_graph import Bucket, CaptureError, GraphedStep, make_buckets
from lightning_thd.callbacks.experts import ExpertChoices
from lightning_thd.cuda_graph.buckets import choose
from lightning_thd.cuda_graph.recording import RecordingBackend
from tests.cuda_graph.support import (
    BUCKETS,
    GraphModule,
    gradients,
    graphed,
    in_graph,
    pad_batch,
    padded_eager,
    random_batch,
    worst,
)
from tests.models.families import build
from tests.models.matrix import relative_error, shake
from tests.tiny import checkpoint_activations, tiny_llama

# Gradients against the unpadded step. In fp64 they differ by 4e-16 at worst, so padding changes nothing but
# rounding; Bamba and Gemma2 compute parts in fp32 whatever the dtype, 3e-8. In fp32 a norm's weight sums some
# hundred rows more, if of zeros, in another order: 1.3e-6 at worst of all gradients here (Qwen3's norms of
# keys), where eager itself is 1.5e-6 from fp64.
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-12}
MIXED = 2e-7
LOSS = 1e-6  # in fp32; 1.1e-7 at worst

FAST = {("qwen3", torch.float32), ("bamba", torch.float32)}  # the others take minutes: -m slow


def family(name: str, dtype: torch.dtype) -> nn.Module:
    model = build(name, "thd").train()
    shake(model)
    return model.to(dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in FAST else pytest.mark.slow)
        for name in ("qwen3", "mistral", "gemma2", "bamba")
        for dtype in TOLERANCES
    ],
)
def test_twenty_layouts_equal_padded_eager_bitwise_and_unpadded_to_rounding(
    name: str, dtype: torch.dtype
) -> None:
    model = family(name, dtype)
    step, used = graphed(model), set()
    count = 20
    tolerance = max(TOLERANCES[dtype], MIXED if name in ("bamba", "gemma2") else 0.0)
    for seed in range(count):
        batch = random_batch(seed)
        bucket, reason = choose(BUCKETS, batch)
        loss = step(batch)
        found = gradients(model, loss)
        eager = causal_lm_loss(model, batch)
        assert relative_error(loss.detach(), eager.detach()) < min(LOSS, tolerance)
        assert worst(found, gradients(model, eager)) < tolerance
        used.add(reason if bucket is None else bucket)
        if bucket is not None:
            padded = padded_eager(model, batch, bucket)
            assert torch.equal(loss, padded)
            wanted = gradients(model, padded)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert used == {*BUCKETS, "tokens"}  # both buckets and fallbacks, interleaved
    assert step.stats.replays + step.stats.fallbacks["tokens"] == count
    assert step.stats.replays > count // 2


class Poisoned(RecordingBackend):
    """Fills every result with NaN before a replay, so that memory that nobody writes shows."""

    def capture(self, function: Any) -> Any:
        tape, result = super().capture(function)

        def replay() -> None:
            results = [x for call in tape.calls for x in call.results if x is not None]
            for x in results:
                if x.is_floating_point():
                    x.detach().fill_(torch.nan)
            tape.replay()

        return SimpleNamespace(replay=replay), result


def test_every_gradient_is_finite_and_equal_when_unwritten_memory_is_nan() -> None:
    model = tiny_llama(torch.float32)
    step, poisoned = graphed(model), graphed(model, backend=Poisoned())
    for seed in range(10):
        batch = random_batch(seed)
        wanted, found = gradients(model, step(batch)), gradients(model, poisoned(batch))
        assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(found, wanted, strict=True))
    assert poisoned.stats.replays >= 5


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama(torch.float32)
        self.model.model.layers[1].mlp = nn.Sequential(self.model.model.layers[1].mlp, nn.Dropout(0.3))


def dropout_loss(module: Any, batch: THDBatch) -> Tensor:
    return causal_lm_loss(module.model, batch)


def test_dropout_draws_anew_in_every_replay_and_equals_eager_under_the_same_seed() -> None:
    module = WithDropout()
    step = graphed(module, dropout_loss, buckets=BUCKETS[:1])
    batch = random_batch(4, count=5)
    torch.manual_seed(1)
    first = step(batch)  # captures, then replays
    gradients(module, first)
    torch.manual_seed(1)
    assert torch.equal(first, step(batch))  # a capture leaves random states as they were
    before = torch.get_rng_state()
    second = step(batch)
    found = gradients(module, second)
    assert not torch.equal(first, second)
    torch.set_rng_state(before)
    with static_shapes():
        wanted = dropout_loss(module, pad_batch(batch, BUCKETS[0]))
    assert torch.equal(second, wanted)
    assert worst(found, gradients(module, wanted)) == 0.0
    assert step.stats.replays == 3


@pytest.mark.parametrize("inside", [False, True])
def test_bf16_autocast_captures_again_and_casts_new_weights(inside: bool) -> None:
    """Accelerate enters one region, with a cache, in every call: a cast from before the graph would stay."""
    model, region = tiny_llama(torch.float32), torch.autocast("cpu", torch.bfloat16)
    step = graphed(model, region(causal_lm_loss) if inside else causal_lm_loss)
    plain = [step(random_batch(seed, count=5)).detach() for seed in range(4)]
    captured = step.stats.captures
    for seed in range(4):
        batch = random_batch(seed, count=5)
        with contextlib.nullcontext() if inside else region:
            loss = step(batch)
        padded = region(in_graph)(model, batch)
        assert torch.equal(loss, padded)
        assert torch.equal(loss, plain[seed]) == (inside and seed == 0)
        assert worst(gradients(model, loss), gradients(model, padded)) == 0.0
        torch._foreach_mul_([p.detach() for p in model.parameters()], 1.1)
    assert (step.stats.captures, step.stats.fallbacks.total()) == (captured * (2 - inside), 0)


def test_activation_checkpointing_is_captured_without_its_saved_random_states() -> None:
    model = build("qwen3", "thd").train()
    checkpoint_activations(model)
    step = graphed(model)
    for seed in range(5):
        batch = random_batch(seed, count=6)
        found = gradients(model, step(batch))
        assert worst(found, gradients(model, in_graph(model, batch))) == 0.0
    assert step.stats.replays == 5


def test_checkpointing_with_dropout_is_refused() -> None:
    module = WithDropout()
    checkpoint_activations(module.model)
    with pytest.raises(CaptureError, match="preserve_rng_state"):
        graphed(module, dropout_loss)(random_batch(0, count=3))


def test_a_capture_that_failed_keeps_nothing_of_its_batch() -> None:
    def loss(module: nn.Module, batch: THDBatch) -> Tensor:
        hidden = causal_lm_loss(module, batch)
        kept.append(weakref.ref(hidden))
        return hidden * hidden.item()  # what no graph can hold

    kept: list[weakref.ref[Tensor]] = []
    step, batch = graphed(tiny_llama(torch.float64), loss), random_batch(0, count=3)
    slots = weakref.ref(batch.input_ids)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(CaptureError):
            step(batch)
        del batch
        assert kept
        assert slots() is None
        assert [each() for each in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_an_oversize_batch_is_never_truncated() -> None:
    model = tiny_llama(torch.float64)
    step = graphed(model, buckets=make_buckets((4, 6), slots=64, max_seqlen=20))
    cases = {"num_sequences": [5] * 7, "tokens": [20, 20, 20, 20], "max_seqlen": [21]}
    for reason, lengths in cases.items():
        batch = THDBatch.collate([{"input_ids": torch.arange(n) % 50} for n in lengths])
        loss = step(batch)
        assert torch.equal(loss, causal_lm_loss(model, batch))
        assert step.stats.fallbacks[reason] == 1
    full = THDBatch.collate([{"input_ids": torch.arange(16)} for _ in range(4)])
    assert torch.equal(step(full), causal_lm_loss(model, full))
    assert step.stats.replays == 1


def test_two_forwards_before_a_backward_share_no_memory() -> None:
    model, eager = tiny_llama(torch.float64), tiny_llama(torch.float64)
    step = graphed(model)
    a, b = random_batch(1, count=4), random_batch(2, count=4)
    first, second = step(a), step(b)
    assert step.stats.fallbacks["pending_backward"] == 1
    found = gradients(model, first + second)
    wanted = gradients(eager, causal_lm_loss(eager, a) + causal_lm_loss(eager, b))
    assert worst(found, wanted) < 1e-13
    # A forward whose backward has become impossible no longer blocks.
    third = step(a)
    del third
    loss = step(b)
    assert step.stats.fallbacks["pending_backward"] == 1
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time through a replayed step"):
        loss.backward()


def test_moved_parameters_are_noticed_and_captured_anew() -> None:
    model = tiny_llama(torch.float64)
    step, batch = graphed(model), random_batch(1, count=4)
    gradients(model, step(batch))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone() * 1.5  # a swap that graphs do not see
    loss = step(batch)
    assert step.stats.fallbacks["parameters_moved"] == 1
    assert torch.equal(loss, causal_lm_loss(model, batch))
    again = step(batch)
    assert step.stats.replays == 2
    assert float((again - loss).abs().detach()) < 1e-12
    model.model.layers[0].mlp.requires_grad_(False)
    del again
    gradients(model, step(batch))
    assert step.stats.fallbacks["parameters_moved"] == 2
    gradients(model, step(batch))
    assert model.model.layers[0].mlp.up_proj.weight.grad is None


def test_rotary_frequencies_that_a_cast_rounded_outlive_the_capture() -> None:
    """They are restored in fp32 at the first forward, which may be the capture's."""
    model = tiny_llama(torch.bfloat16)
    step = graphed(model)
    loss = step(random_batch(0))
    frequencies = model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert torch.equal(loss, padded_eager(model, random_batch(0), choose(BUCKETS, random_batch(0))[0]))
    assert model.model.rotary_emb.inv_freq is frequencies


class Timed(RecordingBackend):
    """Says that every eager step takes 1 s and every replay as long as it is told."""

    def __init__(self, replay_s: float) -> None:
        super().__init__()
        self.times = [1.0, replay_s]
        self.calls = 0

    def time_s(self, function: Any) -> float | None:
        function()
        self.calls += 1
        return self.times[(self.calls - 1) % 2]


def test_times_are_taken_on_as_many_slots_as_the_batch_has() -> None:
    """FP8 kernels refuse the slots of its sequences alone."""
    model, slots = tiny_llama(torch.float64), []

    def loss_of(module: Any, batch: THDBatch) -> Tensor:
        slots.append(batch.input_ids.numel())
        return causal_lm_loss(module, batch)

    buckets = make_buckets((8,), slots=64)
    step = GraphedStep(loss_of, model, buckets=buckets, backend=Timed(0.5))
    step(THDBatch.collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], pad_to=16))
    assert all(count % 16 == 0 for count in slots), slots


@pytest.mark.parametrize(("replay_s", "replays"), [(0.5, 1), (0.99, 0)])
def test_a_replay_that_is_no_faster_is_switched_off(replay_s: float, replays: int) -> None:
    model = tiny_llama(torch.float64)
    step = graphed(model, backend=Timed(replay_s))
    batch = random_batch(1, count=4)
    assert torch.allclose(step(batch), causal_lm_loss(model, batch), rtol=1e-13)
    assert step.stats.replays == replays
    assert step.stats.fallbacks["slower"] == 1 - replays


def test_batches_padded_between_sequences_keep_both_offsets() -> None:
    from lightning_thd.alignment import Alignment

    model = tiny_llama(torch.float64)
    step = graphed(model, buckets=[Bucket(slots=128, sequences=10, max_seqlen=32)])
    samples = [{"input_ids": torch.arange(n) % 60} for n in (5, 9, 17, 3)]
    aligned = THDBatch.collate(samples, align=Alignment(sequence_multiple=8, total_multiple=32))
    assert aligned.cu_seqlens is not aligned.cu_seqlens_padded
    plain = THDBatch.collate(samples)
    assert torch.allclose(step(aligned), causal_lm_loss(model, plain), rtol=1e-12)
    assert step.stats.replays == 1


def test_hooks_on_parameters_run_once_a_step() -> None:
    model, calls = tiny_llama(torch.float64), list[int]()
    step = graphed(model)
    eager = gradients(model, causal_lm_loss(model, random_batch(1, count=4)))
    wanted = [grad.clone() for grad in eager]
    model.lm_head.weight.register_hook(lambda grad: calls.append(1) or 2 * grad)
    found = gradients(model, step(random_batch(1, count=4)))
    assert step.stats.replays == 1
    assert len(calls) == 1
    assert worst(found[:-1], wanted[:-1]) < 1e-13
    assert worst(found[-1:], [2 * wanted[-1]]) < 1e-13


def test_captures_count_no_flops_and_leave_the_state_of_a_first_batch() -> None:
    def relative(module: Any, batch: THDBatch) -> Tensor:
        loss = causal_lm_loss(module.model, batch)
        if module.lr is None:
            module.lr = loss.detach()
        return loss / module.lr

    found = []
    for graphs in (True, False):
        module, monitor = GraphModule(lr=None), THDThroughputMonitor(peak=1e9)  # type: ignore[arg-type]
        step: Any = graphed(module, relative) if graphs else functools.partial(relative, module)
        monitor.watch(module)
        for seed in range(3):
            with monitor.step(batch := random_batch(seed)):
                (loss := step(batch)).backward()
        found.append((monitor.finish()["train/total_flops"], float(loss.detach())))
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_experts_replay_where_their_tokens_are_grouped_without_reading_the_host() -> None:
    model = build("mixtral", "thd").train()
    step, choices = graphed(model), ExpertChoices(model)
    step(random_batch(0, count=4))
    assert not choices.take().any()  # the choices of captures on dummy batches
    for seed in range(5):
        batch = random_batch(seed, count=4)
        found = gradients(model, step(batch))
        assert worst(found, gradients(model, causal_lm_loss(model, batch))) < 1e-5  # fp32
    assert step.stats.replays == 6


def token_losses(model: nn.Module, batch: THDBatch, reduction: str = "sum") -> Tensor:
    logits = model(**batch.hf_kwargs()).logits[0]
    return nn.functional.cross_entropy(logits, batch.targets, reduction=reduction)


def mean_losses(model: nn.Module, batch: THDBatch) -> Tensor:
    """Sum the means of sequences: NaN if a dummy sequence is empty, and without effect if it is not."""
    losses, at = token_losses(model, batch, "none"), batch.cu_seqlens.long()
    return torch.segment_reduce(losses, "mean", offsets=at, unsafe=True).sum()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda m, b: token_losses(m, b) / b.input_ids.numel(), "returns: the value .* eager value by 8"),
        (lambda m, b: token_losses(m, b) / (len(b.cu_seqlens) - 1), "number of slots or sequences"),
        (lambda m, b: token_losses(m, b) / b.max_seqlen, "number of slots or sequences"),
        (mean_losses, "differs from the eager value by nan"),
        (lambda m, b: m(**b.hf_kwargs()).logits.logsumexp(-1).mean(), "or on the padding"),
        (
            lambda m, b: {"loss": causal_lm_loss(m, b), "logits": m(**b.hf_kwargs()).logits[0]},
            r"returns 'logits': a tensor of shape \(24, 64\), and \(128, 64\) from a graph",
        ),
    ],
)
def test_a_step_that_depends_on_the_padding_is_refused(step: Any, message: str) -> None:
    model = tiny_llama(torch.float64)
    found = graphed(model, step)
    with pytest.raises(CaptureError, match=message):
        found(random_batch(1))


class Logs(GraphModule):
    told = False

    def __init__(self, *, sized: bool | None) -> None:
        super().__init__()
        self.sized = sized

    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        learned = (batch.targets != -100).double()
        if self.sized is None:
            if not self.told:
                self.log("first", 1.0)
            self.told = True
        elif self.sized:
            self.log("tokens", learned.sum(), batch_size=batch.input_ids.numel())
        else:
            self.log("share", learned.mean())
        return causal_lm_loss(self.model, batch)


@pytest.mark.parametrize(
    ("sized", "message"),
    [
        (True, "logs 'tokens' with batch_size=24, which depends on the batch"),
        (False, "the step logs 'share': the value from a graph"),
        (None, "logs more in one run than in another"),
    ],
)
def test_a_log_that_depends_on_the_padding_is_refused(sized: bool | None, message: str) -> None:
    step = graphed(Logs(sized=sized), lambda module, batch: module.training_step(batch, 0))
    with pytest.raises(CaptureError, match=message):
        step(random_batch(1))


@pytest.mark.parametrize("reason", ["weights", "shared_prefixes", "extras", "batch_type"])
def test_what_no_graph_holds_runs_eagerly(reason: str) -> None:
    def loss(module: Any, batch: Any) -> Tensor:
        if isinstance(batch, Tensor):
            found: Tensor = module(batch, use_cache=False).logits.sum()
            return found
        return causal_lm_loss(module, batch.replace(extras={}) if batch.extras else batch)

    model = tiny_llama(torch.float64)
    step = graphed(model, loss)
    step(random_batch(1)).backward()
    weights = {"weights": 0.5} if reason == "weights" else {}
    rows = [{"input_ids": range(3, 9), **weights}, {"input_ids": range(3, 21)}]
    batch: Any = THDBatch.collate(rows, share_prefixes=reason == "shared_prefixes")
    if reason == "extras":
        batch = batch.replace(extras={"output_attentions": torch.tensor(0)})
    elif reason == "batch_type":
        batch = torch.ones(1, 5, dtype=torch.int64)
    for _ in range(2):
        assert float(step(batch).detach()) == float(loss(model, batch).detach())
    assert step.stats.fallbacks == {reason: 2}
    step(random_batch(1)).backward()
    assert step.stats.replays == 2


class Island(nn.Module):
    """Matrix products in bf16 around one in fp32, as routers of experts and rotary embeddings have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.a, self.b = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.router = nn.Linear(64, 8)

    def forward(self, batch: THDBatch) -> Tensor:
        x = self.a(self.table(batch.input_ids))
        with torch.autocast("cpu", enabled=False):
            share = self.router(x.float()).softmax(-1)
        y = self.b(x) * share.sum(-1, keepdim=True) + share[:, :1]
        losses = y.float().square().mean(-1)
        return torch.where(batch.targets != -100, losses, 0.0).sum() * batch.loss_scale


def test_an_island_of_fp32_under_autocast_has_the_gradients_of_eager() -> None:
    """Lightning runs backward outside of autocast; captured inside of it, gradients were off by 1e-3."""
    module = Island()
    batch = random_batch(3, count=6)
    used = sum(batch.lengths)
    buckets = make_buckets((6,), slots=used, max_seqlen=used)
    step = GraphedStep(lambda m, b: m(b), module, buckets=buckets, backend=RecordingBackend(), require=True)

    def run(call: Callable[[], Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = call()
        return [x.clone() for x in gradients(module, loss)]

    wanted = run(lambda: module(batch))
    found = run(lambda: step(batch))
    assert step.stats.replays == 1
    assert worst(found, wanted) == 0.0
