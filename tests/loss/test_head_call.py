"""A model called without its head: what it does to its logits, heads of users' own, hooks that read."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

pytest.importorskip("transformers")

from transformers import LlamaForCausalLM

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.loss import causal_lm_logprobs, causal_lm_loss_and_stats, static_shapes
from lightning_thd.loss.lazy_logits import Record, carry_values
from lightning_thd.loss.tiles.logits import LogitMap
from lightning_thd.parallel.pipeline.stage import STAGE
from tests.cuda_graph.support import random_batch
from tests.loss.families import build
from tests.loss.support import gradients
from tests.tiny import tiny_llama

SHAPE = (1, 4, 10)


def capped(x: Tensor) -> Tensor:
    x = x / 3.0
    x = torch.tanh(x)
    return x * 3.0


IN_PLACE = 4
FOLLOWED: list[tuple[Callable[[Any], Any], LogitMap]] = [
    (lambda x: x, LogitMap()),
    (lambda x: x / 4.0, LogitMap(scale=0.25)),
    (lambda x: x * 0.5 * 3, LogitMap(scale=1.5)),
    (lambda x: 2.0 * x.float(), LogitMap(scale=2.0)),
    (lambda x: x.mul_(2.0).div(8.0).to(torch.bfloat16), LogitMap(scale=0.25)),
    (capped, LogitMap(scale=1.0, softcap=3.0)),
    (lambda x: 3.0 * torch.nn.functional.tanh(x * 2.0 / 3.0), LogitMap(scale=2.0, softcap=3.0)),
    (lambda x: capped(x) * 2.0, LogitMap(scale=2.0, softcap=6.0)),
    (lambda x: capped(x) * -1.0, LogitMap(scale=-1.0, softcap=3.0)),
    (lambda x: x[..., :7], LogitMap(valid_vocab_size=7)),
    (lambda x: x[:, :, :-2], LogitMap(valid_vocab_size=8)),
    (lambda x: x[..., :9][..., :-2], LogitMap(valid_vocab_size=7)),
    (lambda x: x[:, :].contiguous()[...], LogitMap()),
]


@pytest.mark.parametrize("number", range(len(FOLLOWED)))
def test_what_a_model_does_is_followed(number: int) -> None:
    function, wanted = FOLLOWED[number]
    logits = carry_values(torch.ones(1), SHAPE)
    seen = function(logits).record.as_map()
    assert logits.record == Record() or number == IN_PLACE  # what a model leaves unused changes nothing
    assert seen.agrees(wanted)
    real = torch.randn(SHAPE, dtype=torch.float64)
    expected = function(real.clone()).double()[0]
    torch.testing.assert_close(
        seen.apply_(real[0].clone())[:, : seen.valid_vocab_size], expected, rtol=1e-2, atol=1e-2
    )


NOT_FOLLOWED: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1.0,
    "tensor": lambda x: x * torch.ones(10),
    "tensor before": lambda x: torch.ones(10) * x,
    "infinite": lambda x: x / 0.0,
    "softmax": lambda x: x.softmax(-1),
    "last slot": lambda x: x[:, -1:],
    "later columns": lambda x: x[..., 2:],
    "rows": lambda x: x[0],
    "two caps": lambda x: torch.tanh(torch.tanh(x)),
    "joined": lambda x: torch.cat([x, x]),
    "in place": lambda x: x.clamp_(-1.0, 1.0),
    "assigned": lambda x: x.__setitem__((..., 0), 1.0),
    "data": lambda x: x.data,
    "given memory": lambda x: torch.mul(x, 2.0, out=torch.empty(SHAPE)),
    "columns in place": lambda x: x[..., :5].mul_(2.0),
    "alias in place": lambda x: x.contiguous().mul_(2.0),
    "in place with an alias": lambda x: (x.contiguous(), x.mul_(2.0))[1],
    "no gradient": torch.no_grad()(lambda x: x * 2.0),
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_cannot_be_followed_gets_zeros_and_is_noted(name: str) -> None:
    logits = carry_values(torch.ones(1), SHAPE)
    function = NOT_FOLLOWED[name]
    assert not logits.lost
    actual = function(logits)
    expected = function(torch.zeros(SHAPE))
    assert logits.lost
    if expected is not None:
        torch.testing.assert_close(actual, expected, equal_nan=True)


WHOLE = r"causal_lm_loss computes the logits of \w+ whole.* because "


def compare(model: nn.Module, other: nn.Module | None = None) -> None:
    """Compare loss, gradients and log-probabilities with those of the model's own logits."""
    batch = random_batch(1)
    loss = causal_lm_loss(model, batch)
    logits = (other or model)(**batch.hf_kwargs()).logits[0]
    expected = F.cross_entropy(logits, batch.targets, ignore_index=-100)
    torch.testing.assert_close(loss, expected)
    ours = gradients(model, loss)
    theirs = gradients(other or model, expected)
    assert ours.keys() == theirs.keys()
    for key, gradient in theirs.items():
        torch.testing.assert_close(ours[key], gradient, msg=key)


class Head(nn.Module):
    """A head of a user's own: what it computes is given, and new parts start where they change nothing."""

    def __init__(self, weight: nn.Parameter, forward: Callable[[Head, Tensor], Tensor]) -> None:
        super().__init__()
        vocabulary, width = weight.shape
        self.weight = weight
        self.function = forward
        self.down = nn.Parameter(torch.randn(4, width).to(weight.dtype))
        self.up = nn.Parameter(torch.zeros(vocabulary, 4).to(weight.dtype))
        self.offset = nn.Parameter(torch.zeros(vocabulary).to(weight.dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(self, hidden)


def overwritten(head: Head, x: Tensor) -> Tensor:
    logits = F.linear(x, head.weight)
    logits += head.offset
    logits[..., 0] = -5.0
    return logits


HEADS: dict[str, Callable[[Head, Tensor], Tensor]] = {
    "LoRA": lambda head, x: F.linear(x, head.weight) + F.linear(F.linear(x, head.down), head.up) * 2.0,
    "overwritten": overwritten,
}


def with_head(forward: Callable[[Head, Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    model: Any = tiny_llama(torch.float64)
    model.lm_head = Head(model.lm_head.weight, forward)
    return model


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_ones_own_is_run_as_it_is_and_learns(name: str) -> None:
    model = with_head(HEADS[name])
    with pytest.warns(UserWarning, match=WHOLE + "its head is not a plain linear layer but a .*Head"):
        compare(model)
    with torch.no_grad():
        for part in (model.lm_head.up, model.lm_head.offset):
            part.add_(0.1 * torch.randn_like(part))
    compare(model)  # without another warning


@pytest.mark.filterwarnings("ignore:causal_lm_loss computes the logits")
def test_log_probabilities_and_statistics_of_whole_logits() -> None:
    model = with_head(HEADS["LoRA"])
    batch = random_batch(1)
    plain: Any = tiny_llama(torch.float64)
    plain.load_state_dict(model.state_dict(), strict=False)

    for options in ({"label_smoothing": 0.1, "z_loss": 1e-3}, {"reduction": "sequences"}):
        torch.testing.assert_close(*(causal_lm_loss(m, batch, **options) for m in (model, plain)))
    with static_shapes():  # as recorded steps run
        torch.testing.assert_close(*(causal_lm_loss(m, batch) for m in (model, plain)))
    actual, expected = (causal_lm_logprobs(m, batch, temperature=0.7) for m in (model, plain))

    torch.testing.assert_close(tuple(actual), tuple(expected))
    stats = [causal_lm_loss_and_stats(m, batch)[1] for m in (model, plain)]
    torch.testing.assert_close(*stats)

    samples = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [5, 6, 9]}]
    batches = [THDBatch.collate(samples, share_prefixes=share) for share in (True, False)]
    torch.testing.assert_close(*(causal_lm_loss(model, batch) for batch in batches))


def test_a_head_that_was_patched_is_run_as_it_is() -> None:
    model = tiny_llama(torch.float64)
    head: Any = model.lm_head
    original = head.forward
    more = nn.Parameter(torch.zeros_like(head.weight))
    head.forward = lambda hidden: original(hidden) + hidden @ more.T
    with pytest.warns(UserWarning, match=WHOLE + "its head"):
        causal_lm_loss(model, random_batch(1)).backward()
    torch.testing.assert_close(more.grad, head.weight.grad)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_with_a_parametrization_that_moves_is_read_once(tied: bool) -> None:
    model: Any = tiny_llama(torch.float64)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    spectral_norm(model.lm_head)
    other = copy.deepcopy(model)
    for _ in range(2):  # each forward in training moves the vectors of its power iteration
        compare(model, other)


def doubled_logits(module: nn.Module, args: Any, output: Any) -> Any:
    output.logits = output.logits * 2
    return output


# What is typed into a notebook or at a prompt has no file.
exec(compile("def typed(m, i, o):\n    o.logits = o.logits.sin()\n    return o", "<ipython-input-3>", "exec"))


def all_doubled(module: nn.Module, args: Any, output: Any) -> Any:
    for name in list(output):
        output[name] = output[name] * 2
    return output


@pytest.mark.parametrize(
    ("place", "hook", "message"),
    [
        ("", doubled_logits, r"doubled_logits \(test_head_call.py.* may read them"),
        ("", globals()["typed"], r"typed \(<ipython-input-3>:1\) may read them"),
        ("", all_doubled, r"all_doubled \(test_head_call.py.* may read them"),
        ("lm_head", lambda m, i, o: o + 1.0, "the model applies add to them"),
        ("lm_head", lambda m, i, o: o.detach() + m.weight.sum(), "the model applies detach to them"),
        (
            "lm_head",
            lambda m, i, o: i[0] @ m.weight.T * 3.0,
            "the model returns other logits than those of its head",
        ),
        ("lm_head", lambda m, i, o: o.argmax() and None, "the model applies argmax to them"),
        (
            "lm_head",
            lambda m, i, o: o.register_hook(lambda g: g * 2) and None,
            "the model applies register_hook to",
        ),
    ],
)
def test_logits_that_a_hook_reads_or_changes_are_computed_whole(
    place: str, hook: Callable[..., Any], message: str
) -> None:
    model = tiny_llama(torch.float64)
    handle = model.get_submodule(place).register_forward_hook(hook)
    with pytest.warns(UserWarning, match=WHOLE + message):
        compare(model)
    compare(model)
    handle.remove()
    compare(model)
    assert not model.__dict__["_thd_head_call"]._whole


def test_logits_that_a_hook_keeps_raise_when_they_are_read_later() -> None:
    model = tiny_llama(torch.float64)
    kept = list[Any]()
    model.lm_head.register_forward_hook(lambda m, i, o: kept.append(o))
    compare(model)
    with pytest.raises(ValueError, match="'argmax' was applied to logits that a hook or a model kept"):
        kept[0].argmax(-1)


class Doubled(LlamaForCausalLM):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().__call__(*args, **kwargs)
        outputs.logits = outputs.logits * 2
        return outputs


class Clipped(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.clamp(-0.1, 0.1)
        return outputs


@pytest.mark.parametrize(
    ("kind", "message"), [(Doubled, "__call__ .* may read them"), (Clipped, "the model applies clamp to")]
)
def test_a_model_that_changes_its_logits_is_followed(kind: type, message: str) -> None:
    model = tiny_llama(torch.float64)
    model.__class__ = kind
    with pytest.warns(UserWarning, match=WHOLE + message):
        compare(model)


def test_a_factor_of_a_heads_hook_is_recorded_and_gradients_of_logits_are_whole() -> None:
    model = tiny_llama(torch.float64)
    seen = list[torch.Size]()
    head: Any = model.lm_head
    head.register_forward_hook(lambda m, i, o: o * 2.0)
    compare(model)
    head.register_full_backward_hook(lambda m, inputs, outputs: seen.append(outputs[0].shape))
    with pytest.warns(UserWarning, match=WHOLE + "<lambda> .* may read them"):
        compare(model)
    assert seen == [(1, len(random_batch(1).input_ids), 64)] * 2


def test_a_model_that_does_something_else_at_every_call_is_computed_whole() -> None:
    model = tiny_llama(torch.float64)
    factors = iter((2.0, 3.0, 4.0, 4.0))
    model.lm_head.register_forward_hook(lambda m, i, o: o * next(factors))
    with pytest.warns(UserWarning, match=WHOLE + "the model changes them in another way in every call"):
        compare(model)


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_a_compiled_head_or_one_with_plain_tensors_is_a_linear_layer_still() -> None:
    model: Any = tiny_llama(torch.float64)
    model.lm_head._parameters["weight"] = model.lm_head.weight.detach().requires_grad_()  # as under FSDP1
    compare(model)
    model.lm_head = torch.compile(model.lm_head, backend="eager")
    compare(model)
    assert not model.__dict__["_thd_head_call"]._warned


def test_whole_logits_of_pipelines_and_of_further_predictions_are_refused() -> None:
    model: Any = tiny_llama(torch.float64)
    model.__class__ = Clipped
    model.__dict__[STAGE] = SimpleNamespace(holds_head=True, share=lambda values: values)
    with pytest.raises(NotImplementedError, match="In a pipeline .* the model applies clamp to them"):
        causal_lm_loss(model, random_batch(1))
    model = with_head(lambda head, x: F.linear(x, head.weight).relu())
    inner = model.forward

    def forward(**kwargs: Any) -> Any:
        outputs = inner(**kwargs, output_hidden_states=True)
        model.lm_head(outputs.hidden_states[-1])
        return outputs

    model.forward = forward
    with (
        pytest.warns(UserWarning, match=WHOLE),
        pytest.raises(ValueError, match="calls its head 2 times, to predict further"),
    ):
        causal_lm_loss(model, random_batch(1))


def test_threads_that_share_a_model_take_turns() -> None:
    model: Any = tiny_llama()
    batches = [THDBatch.collate([{"input_ids": [3, 4, 5 + n]}]) for n in range(4)]
    alone = [causal_lm_loss(model, batch).item() for batch in batches]

    def losses(batch: THDBatch) -> set[float]:
        return {causal_lm_loss(model, batch).item() for _ in range(10)}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(losses, batches)) == [{loss} for loss in alone]


@pytest.mark.parametrize("router_balance", ["microbatch", "sequence"])
def test_a_plain_call_in_another_thread_gets_logits_and_leaves_the_loss_alone(router_balance: Any) -> None:
    """As an evaluation or a sampler runs beside a training step: here in the middle of its forward pass."""
    model = build("Mixtral")
    batch, other = (THDBatch.collate([{"input_ids": ids}]) for ids in ([3, 4, 5], [8, 9, 7, 6]))
    alone = causal_lm_loss(model, batch, router_balance=router_balance)
    expected = model(**other.hf_kwargs())
    outputs: list[Any] = []

    def beside(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            with ThreadPoolExecutor(1) as pool:
                outputs.append(pool.submit(model, **other.hf_kwargs()).result())

    model.get_submodule("model.layers.1").register_forward_hook(beside)
    assert causal_lm_loss(model, batch, router_balance=router_balance).item() == alone.item()
    assert torch.equal(outputs[0].logits, expected.logits)
    assert outputs[0].aux_loss.item() == expected.aux_loss.item()
