"""The check of a loss: planted faults are found and named; right losses of every kind pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    BertConfig,
    MixtralConfig,
    Qwen3Config,
)

from lightning_thd import THDBatch, causal_lm_loss, check_packing, varlen_attention
from lightning_thd.loss import fused_linear_cross_entropy
from lightning_thd.loss.causal_lm import causal_lm_logprobs, dft_loss
from lightning_thd.models import PackingLeakError, probe_loss
from lightning_thd.models.probe_loss import Tokens
from lightning_thd.warnings import THDWarning
from tests.tiny import VOCAB, tiny_llama

Loss = Callable[[Any, THDBatch], Any]
LENGTHS = (3, 5)  # of the leak check, which is not what these tests are about


class Tiny(nn.Module):
    """A model without transformers."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCAB, size)
        self.places = nn.Embedding(64, size)
        self.qkv = nn.Linear(size, 3 * size)
        self.head = nn.Linear(size, VOCAB)
        self.dropout = nn.Dropout(0.3)

    def hidden(self, batch: THDBatch) -> Tensor:
        x = self.tokens(batch.input_ids) + self.places(batch.position_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(1)
        attended = varlen_attention(q, k, v, batch.boundaries).flatten(1)
        out: Tensor = x + self.dropout(attended)
        return out

    def forward(self, batch: THDBatch) -> Tensor:
        logits: Tensor = self.head(self.hidden(batch))
        return logits


def checked(loss: Loss, model: nn.Module | None = None, **options: Any) -> Any:
    return check_packing(model or Tiny(), VOCAB, LENGTHS, False, thorough=False, loss_fn=loss, **options)


def summed(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum", **options)


def of_documents(model: Any, batch: THDBatch) -> list[Tensor]:
    """Return the mean loss of every document."""
    parts = zip(batch.unpack(model(batch)), batch.unpack(batch.targets), strict=True)
    return [F.cross_entropy(logits, targets) for logits, targets in parts]


def balance(logits: Tensor) -> Tensor:
    """Return a stand-in for the balance of experts, which is no mean over tokens."""
    return logits.softmax(-1).mean(0).square().sum()


# ---- Faults


def shifted_again(model: Any, batch: THDBatch) -> Tensor:
    return summed(model(batch)[:-1], batch.targets[1:]) * batch.loss_scale


def ids_shifted_twice(model: Any, batch: THDBatch) -> Tensor:
    return summed(model(batch)[:-2], batch.input_ids[2:]) * batch.loss_scale


def not_shifted(model: Any, batch: THDBatch) -> Tensor:
    return summed(model(batch), batch.input_ids) * batch.loss_scale


def shifted_back(model: Any, batch: THDBatch) -> Tensor:
    return summed(model(batch), batch.targets.roll(1)) * batch.loss_scale


def next_id(model: Any, batch: THDBatch) -> Tensor:
    return F.cross_entropy(model(batch)[:-1], batch.input_ids[1:])


def ends_filled(model: Any, batch: THDBatch) -> Tensor:
    targets = torch.where(batch.targets == -100, batch.input_ids.roll(-1), batch.targets)
    return summed(model(batch), targets) * batch.loss_scale


def mean_of_means(model: Any, batch: THDBatch) -> Tensor:
    return torch.stack(of_documents(model, batch)).mean()


def scaled_means(model: Any, batch: THDBatch) -> Tensor:
    return torch.stack(of_documents(model, batch)).sum() * batch.loss_scale


def scaled_mean(model: Any, batch: THDBatch) -> Tensor:
    return F.cross_entropy(model(batch), batch.targets) * batch.loss_scale


def mean_of_slots(model: Any, batch: THDBatch) -> Tensor:
    return F.cross_entropy(model(batch), batch.targets, reduction="none").mean()


def scaled_mean_of_slots(model: Any, batch: THDBatch) -> Tensor:
    return mean_of_slots(model, batch) * batch.loss_scale


def over_real_tokens(model: Any, batch: THDBatch) -> Tensor:
    return summed(model(batch), batch.targets) / batch.stats.real_tokens


def scaled_over_real_tokens(model: Any, batch: THDBatch) -> Tensor:
    return over_real_tokens(model, batch) * batch.loss_scale


FAULTS: dict[Loss, str] = {
    shifted_again: "loss_fn is shifted twice: the logits of slot t are scored on token t \\+ 2",
    ids_shifted_twice: "loss_fn is shifted twice",
    not_shifted: "scores every token with its own logits.*Use batch.targets",
    shifted_back: "scores every token with its own logits",
    next_id: "scores the last token of a document on the first token of the next one",
    ends_filled: "scores the last token of a document on the first token of the next one",
    mean_of_means: "is a mean of the means of documents: a target weighs 3.00 .*1.55 times",
    scaled_means: "is no sum over targets: one weighs 5.50 times .*A mean of means",
    scaled_mean: r"divides by the targets of the pack and is multiplied by batch.loss_scale.* 1.55 times",
    mean_of_slots: "counts slots without a target, such as padding, in its denominator: one weighs 0.44",
    scaled_mean_of_slots: "counts slots without a target, such as padding",
    over_real_tokens: r"counts ignored targets \(-100\) in its denominator.*\(reduction='sum'\) times",
    scaled_over_real_tokens: "divides by the slots of the pack, ignored ones included",
}


@pytest.mark.parametrize("loss", FAULTS, ids=lambda loss: loss.__name__)
def test_each_fault_is_found_and_said(loss: Loss) -> None:
    with pytest.raises(PackingLeakError, match=FAULTS[loss]) as caught:
        checked(loss)
    report = caught.value.report
    assert "the loss                    is wrong" in str(report)
    assert not report.leaks
    assert "reference/messages.md#losses" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_faults_are_found_in_other_precisions(dtype: torch.dtype) -> None:
    for loss in (shifted_again, next_id, scaled_means, over_real_tokens):
        report = checked(loss, Tiny().to(dtype), raise_on_leak=False)
        assert report.loss_fault is not None, loss


# ---- Right losses

OF_TOKENS = "a sum times batch.loss_scale"
OF_SEQUENCES = "a sum times batch.sequence_scale"


def focal(model: Any, batch: THDBatch) -> Tensor:
    losses = F.cross_entropy(model(batch), batch.targets, reduction="none")
    return losses.square().sum() * batch.loss_scale


def z_loss(model: Any, batch: THDBatch) -> Tensor:
    logits = model(batch)
    return (summed(logits, batch.targets) + 0.01 * logits.logsumexp(-1).square().sum()) * batch.loss_scale


def with_balance(model: Any, batch: THDBatch) -> Tensor:
    logits = model(batch)
    return summed(logits, batch.targets) * batch.loss_scale + 0.3 * balance(logits)


def mean_with_balance(model: Any, batch: THDBatch) -> Tensor:
    """Scale the mean that a model of experts returns, its balance included, by the number of targets."""
    logits = model(batch)
    mean = F.cross_entropy(logits, batch.targets) + 0.3 * balance(logits)
    return mean * batch.loss_tokens * batch.loss_scale


def two_tokens(model: Any, batch: THDBatch) -> Tensor:
    """Predict the token after the next one too."""
    logits = model(batch)
    later = summed(logits[:-1], batch.targets[1:])
    return (summed(logits, batch.targets) + 0.3 * later) * batch.loss_scale


def fused(model: Any, batch: THDBatch) -> Tensor:
    head = model.head
    return (
        fused_linear_cross_entropy(model.hidden(batch), head.weight, batch.targets, bias=head.bias)
        * batch.loss_scale
    )


def masked_ids(model: Any, batch: THDBatch) -> Tensor:
    targets = torch.where(batch.targets == -100, -100, batch.input_ids.roll(-1))
    return summed(model(batch), targets) * batch.loss_scale


RIGHT: dict[str, tuple[Loss, str]] = {
    "sum": (lambda m, b: {"loss": summed(m(b), b.targets) * b.loss_scale}, OF_TOKENS),
    "smoothing": (lambda m, b: summed(m(b), b.targets, label_smoothing=0.1) * b.loss_scale, OF_TOKENS),
    "classes weighted": (
        lambda m, b: summed(m(b), b.targets, weight=torch.linspace(0.5, 2, VOCAB)) * b.loss_scale,
        OF_TOKENS,
    ),
    "focal": (focal, OF_TOKENS),
    "z-loss": (z_loss, OF_TOKENS),
    "balance": (with_balance, OF_TOKENS),
    "mean with balance": (mean_with_balance, OF_TOKENS),
    "two tokens": (two_tokens, OF_TOKENS),
    "fused": (fused, OF_TOKENS),
    "ids that targets mask": (masked_ids, OF_TOKENS),
    "sequences": (lambda m, b: sum(of_documents(m, b)) * b.sequence_scale, OF_SEQUENCES),
    "mean of sequences": (
        lambda m, b: torch.stack(of_documents(m, b)).mean() * len(b) * b.sequence_scale,
        OF_SEQUENCES,
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_losses_pass(name: str) -> None:
    loss, kind = RIGHT[name]
    model = Tiny()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    report = checked(loss, model)
    assert (report.ok, report.loss, report.loss_fault) == (True, kind, None)
    assert f"the loss                    {kind}" in str(report)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert not any("target" in reason for reason in report.skipped)


class PlacesFirst(Tiny):
    """A model whose first table is not that of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        tokens = self.tokens
        del self.tokens
        self.tokens = tokens


class Pairs(Tiny):
    """A model that reads its ids twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Embedding(VOCAB, 32)

    def hidden(self, batch: THDBatch) -> Tensor:
        return super().hidden(batch) + self.pairs(batch.input_ids * 7 % VOCAB)


class ZeroHead(Tiny):
    """A model whose head begins with zeros, as that of nanochat does."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)


@pytest.mark.parametrize("model", [PlacesFirst, Pairs, ZeroHead])
def test_models_of_other_kinds_are_judged_right(model: type[Tiny]) -> None:
    for loss in (RIGHT["sum"][0], RIGHT["balance"][0]):
        assert checked(loss, model()).loss == OF_TOKENS
    for loss in (shifted_again, shifted_back, ends_filled, scaled_means):
        if loss is ends_filled and model is not ZeroHead:
            continue  # ids cannot be changed without changing what the model computes
        with pytest.raises(PackingLeakError, match=FAULTS[loss]):
            checked(loss, model())


def test_a_loss_in_half_precision_is_measured_in_fp32() -> None:
    def inside(loss: Loss) -> Loss:
        def with_autocast(model: Any, batch: THDBatch) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return loss(model, batch)

        return with_autocast

    assert checked(inside(RIGHT["sum"][0])).loss == OF_TOKENS
    assert checked(inside(focal)).loss == OF_TOKENS
    with pytest.raises(PackingLeakError, match=FAULTS[over_real_tokens]):
        checked(inside(over_real_tokens))


def test_a_loss_that_runs_in_half_precision_only_is_judged_more_widely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def impossible(*_: Any, **__: Any) -> Iterator[bool]:
        yield False

    monkeypatch.setattr(probe_loss, "in_fp32", impossible)

    def upcast(model: Any, batch: THDBatch) -> Tensor:
        return summed(model(batch).float(), batch.targets) * batch.loss_scale

    def upcast_mean(model: Any, batch: THDBatch) -> Tensor:
        return F.cross_entropy(model(batch).float(), batch.targets) * batch.loss_scale

    assert checked(upcast, Tiny().to(torch.bfloat16)).loss == OF_TOKENS
    with pytest.raises(PackingLeakError, match=FAULTS[scaled_mean]):
        checked(upcast_mean, Tiny().to(torch.bfloat16))
    report = checked(RIGHT["sum"][0], Tiny().to(torch.bfloat16))
    assert "the loss: it is computed in torch.bfloat16, and did not run in fp32" in report.skipped


def of_transformers(model: Any, batch: THDBatch, **options: Any) -> Any:
    targets = batch.targets[None]
    return model(**batch.hf_kwargs(), labels=targets, shift_labels=targets, **options).loss


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def experts() -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        **SIZES,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="thd")
    return model


def dense() -> nn.Module:
    return tiny_llama(torch.float32)


OF_MODELS: dict[str, tuple[Callable[[], nn.Module], Loss, str]] = {
    "causal": (dense, lambda m, b: causal_lm_loss(m, b, label_smoothing=0.1, z_loss=1e-3), OF_TOKENS),
    "sequences": (dense, lambda m, b: causal_lm_loss(m, b, reduction="sequences"), OF_SEQUENCES),
    "dft": (dense, lambda m, b: dft_loss(causal_lm_logprobs(m, b).logp, b), OF_TOKENS),
    "transformers": (
        dense,
        lambda m, b: of_transformers(m, b, num_items_in_batch=1 / b.loss_scale),
        OF_TOKENS,
    ),
    "experts": (experts, causal_lm_loss, OF_TOKENS),
    "experts of a microbatch": (
        experts,
        lambda m, b: causal_lm_loss(m, b, router_balance="microbatch"),
        OF_TOKENS,
    ),
    "experts of transformers": (
        experts,
        lambda m, b: of_transformers(m, b) * b.loss_tokens * b.loss_scale,
        OF_TOKENS,
    ),
}


@pytest.mark.parametrize("name", OF_MODELS)
def test_losses_of_models_of_transformers_pass(name: str) -> None:
    build, loss, kind = OF_MODELS[name]
    report = checked(loss, build())
    assert (report.ok, report.loss, report.skipped) == (True, kind, ())


def test_labels_of_the_tokens_themselves_are_no_fault_of_a_classifier() -> None:
    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, num_labels=5)
    tagger = AutoModelForTokenClassification.from_config(config, attn_implementation="thd")

    def loss(model: Any, batch: THDBatch) -> Tensor:
        labels = batch.targets.roll(1)
        return summed(model(**batch.hf_kwargs()).logits[0], labels) * batch.loss_scale

    assert checked(loss, tagger).loss == OF_TOKENS

    options = {"attention_probs_dropout_prob": 0.0}
    encoder = AutoModelForMaskedLM.from_config(BertConfig(**SIZES, **options), attn_implementation="thd")
    report = checked(loss, encoder)
    assert report.loss == OF_TOKENS
    assert "which slot scores a target: the model looks at later tokens" in report.skipped


# ---- Losses that no scale multiplies, and what cannot be measured


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda m, b: F.cross_entropy(m(b), b.targets), "is a mean over its own targets and reads no scale"),
        (lambda m, b: summed(m(b), b.targets), "is a sum that no scale of the batch multiplies"),
    ],
)
def test_a_loss_without_a_scale_is_warned_of(loss: Loss, words: str) -> None:
    with pytest.warns(THDWarning, match=words):
        assert checked(loss).ok


def test_ids_as_labels_are_warned_of_if_ignored_tokens_are_learned() -> None:
    def loss(model: Any, batch: THDBatch) -> Tensor:
        return model(**batch.hf_kwargs(), labels=batch.input_ids[None]).loss * batch.loss_scale

    def inside(model: Any, batch: THDBatch) -> Tensor:
        is_inside = batch.position_ids[1:] > 0
        return summed(model(batch)[:-1][is_inside], batch.input_ids[1:][is_inside]) * batch.loss_scale

    with pytest.raises(PackingLeakError, match="counts|divides"):
        checked(loss, dense())  # a mean that is scaled
    with pytest.warns(THDWarning, match="takes input_ids as labels, and learns tokens whose label is -100"):
        assert checked(inside).loss == OF_TOKENS


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda m, b: summed(m(b), b.targets) * torch.rand(()), "draws random numbers"),
        (lambda m, b: m(b).mean(), "no label moves it"),
        (lambda m, b: None, "returned no tensor of one number"),
        (lambda m, b: m(b).sum() * float("nan"), "it was nan"),
    ],
)
def test_what_cannot_be_measured_is_said(loss: Loss, reason: str) -> None:
    report = checked(loss)
    assert (report.ok, report.loss) == (True, None)
    assert any(reason in text for text in report.skipped), report.skipped


def test_ids_that_a_model_reads_twice_are_no_labels() -> None:
    report = checked(lambda model, batch: model(batch).square().mean(), Pairs())
    assert "the loss: no target moves it" in report.skipped


def test_errors_of_the_loss_reach_its_author() -> None:
    with pytest.raises(ZeroDivisionError):
        checked(lambda model, batch: 1 / 0)
    with pytest.raises(ValueError, match="Pass shift_labels=labels too"):
        checked(lambda m, b: m(**b.hf_kwargs(), labels=b.targets[None]).loss, dense())
    wrong: Any = 3
    with pytest.raises(TypeError, match="loss_fn is .*; wanted a function of model and batch"):
        checked(wrong)


def test_a_model_that_leaks_has_its_loss_left_out() -> None:
    class Leaking(Tiny):
        def hidden(self, batch: THDBatch) -> Tensor:
            return super().hidden(batch).cumsum(0)

    report = checked(shifted_again, Leaking(), raise_on_leak=False)
    assert report.leaks
    assert "the loss: the model has to be right first" in report.skipped


def test_tokens_of_a_batch() -> None:
    rows = [{"input_ids": [4, 5, 6]}, {"input_ids": [7, 8], "next_label": 9}]
    tokens = Tokens.of(THDBatch.collate(rows, pad_to=8))
    assert (tokens.ids.tolist(), tokens.labels.tolist(), tokens.are_next) == (
        [5, 6, 8, 9],
        [5, 6, 8, 9],
        True,
    )

    rows = [{"input_ids": [4, 5, 6], "labels": [-100, 1, 0]}]
    tokens = Tokens.of(THDBatch.collate(rows))
    assert (tokens.ids.tolist(), tokens.labels.tolist(), tokens.are_next) == ([4, 5, 6], [0, 1], False)


def test_the_default_device_changes_nothing() -> None:
    model = Tiny()
    with torch.device("meta"):
        report = checked(z_loss, model)
    assert report.loss == checked(z_loss, model).loss
