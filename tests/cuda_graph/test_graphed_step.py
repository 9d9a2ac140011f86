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
    """A model of a family, whose weights are far from their initial values."""
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
    """Loss and gradients are those of the padded batch, bit for bit, and of the batch itself nearly."""
    model = family(name, dtype)
    step = graphed(model)
    tolerance = TOLERANCES[dtype]
    if name in ("bamba", "gemma2"):
        tolerance = max(tolerance, MIXED)

    num_batches = 20
    buckets_used = set()
    for seed in range(num_batches):
        batch = random_batch(seed)
        bucket, reason = choose(BUCKETS, batch)
        buckets_used.add(reason if bucket is None else bucket)
        loss = step(batch)
        replayed = gradients(model, loss)

        eager_loss = causal_lm_loss(model, batch)
        assert relative_error(loss.detach(), eager_loss.detach()) < min(LOSS, tolerance)
        assert worst(replayed, gradients(model, eager_loss)) < tolerance
        if bucket is not None:
            padded_loss = padded_eager(model, batch, bucket)
            assert torch.equal(loss, padded_loss)
            padded = gradients(model, padded_loss)
            torch.testing.assert_close(replayed, padded, rtol=0, atol=0)

    assert buckets_used == {*BUCKETS, "tokens"}  # both buckets and fallbacks, interleaved
    assert step.stats.replays + step.stats.fallbacks["tokens"] == num_batches
    assert step.stats.replays > num_batches // 2


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
    """No gradient depends on memory that a replay reads before it writes."""
    model = tiny_llama(torch.float32)
    step = graphed(model)
    poisoned_step = graphed(model, backend=Poisoned())
    for seed in range(10):
        batch = random_batch(seed)
        expected = gradients(model, step(batch))
        for a, b in zip(gradients(model, poisoned_step(batch)), expected, strict=True):
            assert torch.equal(a, b)
            assert a.isfinite().all()
    assert poisoned_step.stats.replays >= 5


class WithDropout(nn.Module):
    """A tiny model with dropout behind one MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama(torch.float32)
        self.model.model.layers[1].mlp = nn.Sequential(self.model.model.layers[1].mlp, nn.Dropout(0.3))


def dropout_loss(module: Any, batch: THDBatch) -> Tensor:
    return causal_lm_loss(module.model, batch)


def test_dropout_draws_anew_in_every_replay_and_equals_eager_under_the_same_seed() -> None:
    """Replays draw from the generator as eager steps do, and a capture leaves it as it was."""
    module = WithDropout()
    step = graphed(module, dropout_loss, buckets=BUCKETS[:1])
    batch = random_batch(4, count=5)
    torch.manual_seed(1)
    first = step(batch)  # captures, then replays
    gradients(module, first)
    torch.manual_seed(1)
    assert torch.equal(first, step(batch))  # a capture leaves random states as they were

    random_state = torch.get_rng_state()
    second = step(batch)
    replayed = gradients(module, second)
    assert not torch.equal(first, second)
    torch.set_rng_state(random_state)
    with static_shapes():
        eager = dropout_loss(module, pad_batch(batch, BUCKETS[0]))
    assert torch.equal(second, eager)
    assert worst(replayed, gradients(module, eager)) == 0.0
    assert step.stats.replays == 3


@pytest.mark.parametrize("inside", [False, True])
def test_bf16_autocast_captures_again_and_casts_new_weights(inside: bool) -> None:
    """Accelerate enters one region, with a cache, in every call: a cast from before the graph would stay."""
    model = tiny_llama(torch.float32)
    autocast = torch.autocast("cpu", torch.bfloat16)
    step = graphed(model, autocast(causal_lm_loss) if inside else causal_lm_loss)
    first_losses = [step(random_batch(seed, count=5)).detach() for seed in range(4)]
    first_captures = step.stats.captures

    for seed in range(4):
        batch = random_batch(seed, count=5)
        with contextlib.nullcontext() if inside else autocast:
            loss = step(batch)
        eager_loss = autocast(in_graph)(model, batch)
        assert torch.equal(loss, eager_loss)
        assert torch.equal(loss, first_losses[seed]) == (inside and seed == 0)
        assert worst(gradients(model, loss), gradients(model, eager_loss)) == 0.0
        torch._foreach_mul_([p.detach() for p in model.parameters()], 1.1)

    captures = first_captures if inside else 2 * first_captures  # autocast outside of the step is a change
    assert step.stats.captures == captures
    assert step.stats.fallbacks.total() == 0


def test_activation_checkpointing_is_captured_without_its_saved_random_states() -> None:
    """A checkpointed model has the gradients of eager on the padded batch, in every replay."""
    model = build("qwen3", "thd").train()
    checkpoint_activations(model)
    step = graphed(model)
    for seed in range(5):
        batch = random_batch(seed, count=6)
        replayed = gradients(model, step(batch))
        assert worst(replayed, gradients(model, in_graph(model, batch))) == 0.0
    assert step.stats.replays == 5


def test_checkpointing_with_dropout_is_refused() -> None:
    """No graph can set the random state with which checkpointing would draw dropout again."""
    module = WithDropout()
    checkpoint_activations(module.model)
    with pytest.raises(CaptureError, match="preserve_rng_state"):
        graphed(module, dropout_loss)(random_batch(0, count=3))


def test_a_capture_that_failed_keeps_nothing_of_its_batch() -> None:
    """Neither the batch nor a tensor of the failed step is alive, without a run of the collector."""

    def loss(module: nn.Module, batch: THDBatch) -> Tensor:
        value = causal_lm_loss(module, batch)
        losses.append(weakref.ref(value))
        return value * value.item()  # what no graph can hold

    losses: list[weakref.ref[Tensor]] = []
    step = graphed(tiny_llama(torch.float64), loss)
    batch = random_batch(0, count=3)
    input_ids = weakref.ref(batch.input_ids)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(CaptureError):
            step(batch)
        del batch
        assert losses
        assert input_ids() is None
        assert all(value() is None for value in losses)
    finally:
        gc.enable()


def test_an_oversize_batch_is_never_truncated() -> None:
    """A batch with too many sequences, tokens or too long a sequence runs eagerly; a full one replays."""
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
    """A second forward runs eagerly while the first one's backward is to come; a second backward raises."""
    model = tiny_llama(torch.float64)
    eager = tiny_llama(torch.float64)
    step = graphed(model)
    a = random_batch(1, count=4)
    b = random_batch(2, count=4)
    loss = step(a) + step(b)
    assert step.stats.fallbacks["pending_backward"] == 1
    replayed = gradients(model, loss)
    expected = gradients(eager, causal_lm_loss(eager, a) + causal_lm_loss(eager, b))
    assert worst(replayed, expected) < 1e-13

    # A forward whose backward has become impossible no longer blocks.
    loss_without_backward = step(a)
    del loss_without_backward
    loss = step(b)
    assert step.stats.fallbacks["pending_backward"] == 1
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time through a replayed step"):
        loss.backward()


def test_moved_parameters_are_noticed_and_captured_anew() -> None:
    """After a swap of weights, and after a layer is frozen, one step runs eagerly and the next replays."""
    model = tiny_llama(torch.float64)
    step = graphed(model)
    batch = random_batch(1, count=4)
    gradients(model, step(batch))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone() * 1.5  # a swap that graphs do not see
    loss = step(batch)
    assert step.stats.fallbacks["parameters_moved"] == 1
    assert torch.equal(loss, causal_lm_loss(model, batch))
    replayed_loss = step(batch)
    assert step.stats.replays == 2
    assert float((replayed_loss - loss).abs().detach()) < 1e-12

    model.model.layers[0].mlp.requires_grad_(False)
    del replayed_loss
    gradients(model, step(batch))
    assert step.stats.fallbacks["parameters_moved"] == 2
    gradients(model, step(batch))
    assert model.model.layers[0].mlp.up_proj.weight.grad is None


def test_rotary_frequencies_that_a_cast_rounded_outlive_the_capture() -> None:
    """They are restored in fp32 at the first forward, which may be the capture's."""
    model = tiny_llama(torch.bfloat16)
    step = graphed(model)
    batch = random_batch(0)
    loss = step(batch)
    frequencies = model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert torch.equal(loss, in_graph(model, batch))
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
    model = tiny_llama(torch.float64)
    slots = []

    def loss_of(module: Any, batch: THDBatch) -> Tensor:
        slots.append(batch.input_ids.numel())
        return causal_lm_loss(module, batch)

    buckets = make_buckets((8,), slots=64)
    step = GraphedStep(loss_of, model, buckets=buckets, backend=Timed(0.5))
    step(THDBatch.collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], pad_to=16))
    assert all(count % 16 == 0 for count in slots), slots


@pytest.mark.parametrize(("replay_s", "replays"), [(0.5, 1), (0.99, 0)])
def test_a_replay_that_is_no_faster_is_switched_off(replay_s: float, replays: int) -> None:
    """A bucket whose replay gains less than 2 % runs eagerly, with the same loss."""
    model = tiny_llama(torch.float64)
    step = graphed(model, backend=Timed(replay_s))
    batch = random_batch(1, count=4)
    assert torch.allclose(step(batch), causal_lm_loss(model, batch), rtol=1e-13)
    assert step.stats.replays == replays
    assert step.stats.fallbacks["slower"] == 1 - replays


def test_batches_padded_between_sequences_keep_both_offsets() -> None:
    """A replayed batch with padding inside has the loss of the batch without."""
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
    """A hook that doubles a gradient runs once in a replay, and in no capture."""
    model = tiny_llama(torch.float64)
    calls = 0

    def double(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 2 * gradient

    step = graphed(model)
    batch = random_batch(1, count=4)
    *others, of_head = [gradient.clone() for gradient in gradients(model, causal_lm_loss(model, batch))]
    model.lm_head.weight.register_hook(double)
    replayed = gradients(model, step(batch))
    assert step.stats.replays == 1
    assert calls == 1
    assert worst(replayed, [*others, 2 * of_head]) < 1e-13


def test_captures_count_no_flops_and_leave_the_state_of_a_first_batch() -> None:
    """With graphs, a step that remembers its first loss has eager's losses and FLOPs."""

    def relative_to_first(module: Any, batch: THDBatch) -> Tensor:
        loss = causal_lm_loss(module.model, batch)
        if module.lr is None:
            module.lr = loss.detach()
        return loss / module.lr

    def run(*, graphs: bool) -> tuple[float, float]:
        """Return the FLOPs of three steps and the last loss."""
        module = GraphModule(lr=None)  # type: ignore[arg-type]
        monitor = THDThroughputMonitor(peak=1e9)
        step: Any = functools.partial(relative_to_first, module)
        if graphs:
            step = graphed(module, relative_to_first)
        monitor.watch(module)
        for seed in range(3):
            batch = random_batch(seed)
            with monitor.step(batch):
                loss = step(batch)
                loss.backward()
        return monitor.finish()["train/total_flops"], float(loss.detach())

    assert run(graphs=True) == pytest.approx(run(graphs=False), rel=1e-12)


def test_experts_replay_where_their_tokens_are_grouped_without_reading_the_host() -> None:
    """A mixture of experts replays with eager's gradients, and captures leave no choices to count."""
    model = build("mixtral", "thd").train()
    step = graphed(model)
    choices = ExpertChoices(model)
    step(random_batch(0, count=4))
    assert not choices.take().any()  # the choices of captures on dummy batches
    for seed in range(5):
        batch = random_batch(seed, count=4)
        replayed = gradients(model, step(batch))
        assert worst(replayed, gradients(model, causal_lm_loss(model, batch))) < 1e-5  # fp32
    assert step.stats.replays == 6


def token_losses(model: nn.Module, batch: THDBatch, reduction: str = "sum") -> Tensor:
    logits = model(**batch.hf_kwargs()).logits[0]
    return nn.functional.cross_entropy(logits, batch.targets, reduction=reduction)


def mean_losses(model: nn.Module, batch: THDBatch) -> Tensor:
    """Sum the means of sequences: NaN if a dummy sequence is empty, and without effect if it is not."""
    losses = token_losses(model, batch, "none")
    return torch.segment_reduce(losses, "mean", offsets=batch.cu_seqlens.long(), unsafe=True).sum()


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
    """A step that would return other values in a graph is refused, and the message says which and why."""
    graphed_step = graphed(tiny_llama(torch.float64), step)
    with pytest.raises(CaptureError, match=message):
        graphed_step(random_batch(1))


class Logs(GraphModule):
    """Logs a value, or a number beside it, that no graph can repeat."""

    has_logged = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: THDBatch, batch_idx: int) -> Any:
        is_learned = (batch.targets != -100).double()
        if self.kind == "batch size":
            self.log("tokens", is_learned.sum(), batch_size=batch.input_ids.numel())
        elif self.kind == "share of slots":
            self.log("share", is_learned.mean())
        elif not self.has_logged:
            self.log("first", 1.0)
            self.has_logged = True
        return causal_lm_loss(self.model, batch)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("batch size", "logs 'tokens' with batch_size=24, which depends on the batch"),
        ("share of slots", "the step logs 'share': the value from a graph"),
        ("first step only", "logs more in one run than in another"),
    ],
)
def test_a_log_that_depends_on_the_padding_is_refused(kind: str, message: str) -> None:
    """A step that would log other values in a graph is refused, and the message says which."""
    step = graphed(Logs(kind), lambda module, batch: module.training_step(batch, 0))
    with pytest.raises(CaptureError, match=message):
        step(random_batch(1))


@pytest.mark.parametrize("reason", ["weights", "shared_prefixes", "extras", "batch_type"])
def test_what_no_graph_holds_runs_eagerly(reason: str) -> None:
    """Such a batch is counted by its reason, has eager's loss, and leaves the graphs usable."""

    def loss(module: Any, batch: Any) -> Tensor:
        if isinstance(batch, Tensor):
            total: Tensor = module(batch, use_cache=False).logits.sum()
            return total
        if batch.extras:
            batch = batch.replace(extras={})
        return causal_lm_loss(module, batch)

    model = tiny_llama(torch.float64)
    step = graphed(model, loss)
    step(random_batch(1)).backward()

    rows: list[dict[str, Any]] = [{"input_ids": range(3, 9)}, {"input_ids": range(3, 21)}]
    if reason == "weights":
        rows[0]["weights"] = 0.5
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
        self.table = nn.Embedding(64, 64)
        self.a = nn.Linear(64, 64)
        self.b = nn.Linear(64, 64)
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
    slots = sum(batch.lengths)
    buckets = make_buckets((6,), slots=slots, max_seqlen=slots)
    step = GraphedStep(lambda m, b: m(b), module, buckets=buckets, backend=RecordingBackend(), require=True)

    def run(call: Callable[[], Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = call()
        return [x.clone() for x in gradients(module, loss)]

    eager = run(lambda: module(batch))
    replayed = run(lambda: step(batch))
    assert step.stats.replays == 1
    assert worst(replayed, eager) == 0.0
