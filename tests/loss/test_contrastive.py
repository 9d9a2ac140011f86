"""InfoNCE of packed queries and documents against loops over single pairs, on any number of ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_thd import Sequences, THDBatch, THDDataModule
from lightning_thd.batch import THDStep
from lightning_thd.loss.contrastive import embed, info_nce, pair_losses
from tests.loss.embedding_models import EXAMPLES, encoder, largest_difference, loss_by_hand

PAIRS = [(0, 0), (1, 1), (1, 2), (2, 4), (3, 5), (3, 6), (3, 7)]  # document 3 and 8 are negatives


def embeddings(rows: int, size: int = 8, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, dtype=torch.float64, generator=generator).requires_grad_()


def by_hand(
    queries: Tensor,
    documents: Tensor,
    pairs: Any,
    *,
    temperature: float = 0.05,
    symmetric: bool = False,
    normalize: bool = True,
) -> Tensor:
    """Compute each pair's loss by one loop over its candidates."""

    def score(a: Tensor, b: Tensor) -> Tensor:
        size = a.norm() * b.norm() if normalize else 1.0
        return (a @ b) / size / temperature

    losses = []
    for q, d in pairs:
        of_positive = score(queries[q], documents[d])
        taken = {b for a, b in pairs if a == q}
        total = of_positive.exp()
        for i, document in enumerate(documents):
            total = total + (0.0 if i in taken else score(queries[q], document).exp())
        loss = total.log() - of_positive
        if symmetric:
            taken = {a for a, b in pairs if b == d}
            total = of_positive.exp()
            for i, query in enumerate(queries):
                total = total + (0.0 if i in taken else score(query, documents[d]).exp())
            loss = (loss + total.log() - of_positive) / 2
        losses.append(loss)
    return torch.stack(losses)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"symmetric": True}, {"normalize": False, "temperature": 2.0}],
    ids=["plain", "warm", "symmetric", "dot"],
)
def test_losses_and_gradients_of_pairs_are_those_of_a_loop(options: dict[str, Any]) -> None:
    queries = embeddings(4)
    documents = embeddings(9, seed=1)
    losses = pair_losses(queries, documents, PAIRS, **options)
    gradients = torch.autograd.grad(losses.square().sum(), [queries, documents])
    wanted = by_hand(queries, documents, PAIRS, **options)
    assert torch.allclose(losses, wanted, rtol=1e-9, atol=1e-12)
    for actual, expected in zip(
        gradients, torch.autograd.grad(wanted.square().sum(), [queries, documents]), strict=True
    ):
        assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-12)


def test_a_document_of_two_queries_is_no_negative_of_either() -> None:
    queries = embeddings(3)
    documents = embeddings(3, seed=1)
    pairs = [(0, 0), (1, 0), (2, 2)]
    losses = pair_losses(queries, documents, pairs, symmetric=True)
    assert torch.allclose(losses, by_hand(queries, documents, pairs, symmetric=True), rtol=1e-9)


def test_sizes_of_embeddings_add_their_weighted_losses() -> None:
    queries = embeddings(4)
    documents = embeddings(9, seed=1)
    losses = pair_losses(queries, documents, PAIRS, dims=(8, 2), dim_weights=(1.0, 0.3))
    short = by_hand(queries[:, :2], documents[:, :2], PAIRS)
    assert torch.allclose(losses, by_hand(queries, documents, PAIRS) + 0.3 * short, rtol=1e-9)


def test_pairs_without_negatives_have_loss_zero_and_gradient_zero() -> None:
    queries = embeddings(1)
    documents = embeddings(2, seed=1)
    losses = pair_losses(queries, documents, [(0, 0), (0, 1)])
    losses.sum().backward()
    assert losses.tolist() == [0.0, 0.0]
    assert queries.grad is not None
    assert queries.grad.abs().max() == 0.0


def test_the_mean_is_the_ranking_loss_with_multiple_negatives() -> None:
    """The formula of sentence-transformers 6.2's MultipleNegativesRankingLoss, in fp32, written out."""
    queries = embeddings(5).float()  # 5 positives, 5 negatives
    documents = embeddings(10, seed=1).float()
    scores = F.normalize(queries, dim=1) @ F.normalize(documents, dim=1).T * 20.0
    expected = -(scores.diagonal() - scores.logsumexp(1)).mean()
    assert pair_losses(queries, documents).mean().item() == pytest.approx(expected.item(), rel=1e-5)


def test_half_precision_is_compared_in_fp32() -> None:
    queries = embeddings(4).bfloat16()
    documents = embeddings(4, seed=1).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        losses = pair_losses(queries, documents)
    assert losses.dtype == torch.float32
    assert torch.allclose(losses, pair_losses(queries.float(), documents.float()), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, r"temperature=0.0; wanted a finite number above 0.*1 / scale"),
        ({"temperature": float("nan")}, "temperature=nan; wanted a finite number above 0"),
        ({"dims": ()}, r"dims=\(\); wanted one or more different sizes"),
        ({"dims": (4, 4)}, r"dims=\(4, 4\); wanted one or more different sizes"),
        ({"dims": (0, 4)}, r"dims\[0\] is 0; wanted 1 or more"),
        ({"dims": (16, 4)}, r"dims=\(16, 4\), but the embeddings have 8 numbers.*Leave out"),
        ({"dims": (8, 4), "dim_weights": (1.0,)}, "1 dim_weights but 2 dims. Give one each"),
        ({"dim_weights": (1.0,)}, "dim_weights= was given without dims="),
        ({"dims": (8,), "dim_weights": (-1.0,)}, r"dim_weights\[0\]=-1.0; wanted a finite number of 0"),
        ({"pairs": [(0, 9)]}, r"pair \[0, 9\] names a row outside of 4 queries and 9 documents"),
        ({"pairs": [(-1, 0)]}, r"pair \[-1, 0\] names a row outside"),
        ({"pairs": [(1, 1), (0, 0), (1, 1)]}, r"pair \[1, 1\] is there twice. Give each pair once"),
        ({"pairs": [[0, 1, 2]]}, r"pairs has shape \(1, 3\); wanted \[P, 2\]"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair_losses(embeddings(4), embeddings(9, seed=1), **options)


@pytest.mark.parametrize(
    ("queries", "documents", "message"),
    [
        (embeddings(4), embeddings(3), "4 queries but 3 documents, and no pairs"),
        (embeddings(4), embeddings(4, 6), "queries have 8 numbers a row but documents have 6"),
        (embeddings(4)[0], embeddings(4), r"queries is .*\[8\]; wanted floats \[rows, D\]"),
    ],
)
def test_embeddings_that_do_not_fit_are_named(queries: Tensor, documents: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair_losses(queries, documents)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
@pytest.mark.parametrize("family", ["qwen3", "bert", "modernbert", "embeddinggemma"])
def test_a_pack_equals_texts_alone(family: str, pooling: Any) -> None:
    model = encoder(family)
    stock = encoder(family, attention="sdpa")
    batch = THDBatch.collate(EXAMPLES)
    loss = info_nce(model, batch, pooling=pooling)
    expected = loss_by_hand(stock, EXAMPLES, pooling=pooling)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    # Gemma computes its norms in fp32, also in a model of fp64.
    tolerance = 1e-7 if family == "embeddinggemma" else 1e-9
    assert largest_difference(gradients(model, loss), gradients(stock, expected)) < tolerance


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("capacity", [400, 60, 32])
def test_a_step_of_several_microbatches_equals_one_batch(capacity: int, dropout: float) -> None:
    """Dropout has no unpacked oracle: its cached pass must then equal one graph over all microbatches."""
    options: dict[str, Any] = {"symmetric": True, "dims": (32, 8), "pooling": "mean"}
    data = THDDataModule(EXAMPLES, capacity=capacity, global_batch=Sequences(len(EXAMPLES)))
    data.setup("fit")
    (step,) = data.train_steps()

    assert (len(step) > 1) == (capacity < 400)
    model = encoder("bert", dropout=dropout)
    torch.manual_seed(3)
    losses = []
    model.zero_grad()

    for batch in step.microbatches:
        loss = info_nce(model, batch.to("cpu"), **options)
        (loss / len(step)).backward()
        losses.append(loss.detach())

    accumulated = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if dropout:
        torch.manual_seed(3)
        whole = torch.cat([embed(model, batch, pooling="mean") for batch in step.microbatches])
        sequences = [row for batch in step.microbatches for row in batch.unpack(batch.input_ids)]
        together = THDBatch.collate([EXAMPLES[i] for i in _order(step)])
        assert [row.tolist() for row in together.unpack(together.input_ids)] == [
            x.tolist() for x in sequences
        ]
        expected = info_nce(whole, together, **options)
    else:
        model = encoder("bert", attention="sdpa")
        expected = loss_by_hand(model, EXAMPLES, **options)

    assert torch.stack(losses).mean().item() == pytest.approx(expected.item(), rel=1e-9)
    assert largest_difference(accumulated, gradients(model, expected)) < 1e-9


def _order(step: THDStep) -> list[int]:
    return list(dict.fromkeys(i for batch in step.microbatches for i in batch.sequence_ids))


def test_functions_and_embeddings_serve_as_models() -> None:
    model = encoder("qwen3")
    batch = THDBatch.collate(EXAMPLES)
    head = torch.nn.Linear(32, 16, dtype=torch.float64)

    def project(batch: THDBatch) -> Tensor:
        return head(embed(model, batch))

    expected = info_nce(project(batch), batch)
    assert torch.equal(info_nce(project, batch), expected)
    step = THDStep([THDBatch.collate(EXAMPLES[:4]), THDBatch.collate(EXAMPLES[4:])])
    halves = [info_nce(project, part) for part in step.microbatches]
    assert torch.stack(halves).mean().item() == pytest.approx(expected.item(), rel=1e-12)
    with pytest.raises(ValueError, match="embeddings of one of 2 microbatches.*Pass the model"):
        info_nce(project(step.microbatches[0]), step.microbatches[0])


def test_a_second_call_and_a_second_run_of_a_step_have_caches_of_their_own() -> None:
    model = encoder("qwen3")
    step = THDStep([THDBatch.collate(EXAMPLES[:4]), THDBatch.collate(EXAMPLES[4:])])
    expected = [info_nce(model, part).item() for part in step.microbatches]
    values = [
        (info_nce(model, part).item(), info_nce(model, part, temperature=1.0).item())
        for part in step.microbatches
    ]
    assert [first for first, _ in values] == expected
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert info_nce(model, step.microbatches[0]).item() != expected[0]


@pytest.mark.parametrize("kind", ["closure", "default", "partial"])
def test_two_models_behind_one_kind_of_function_have_caches_of_their_own(kind: str) -> None:
    """The second model's cache once took the place of the first one's, without a word."""
    models = [encoder("modernbert").eval(), encoder("modernbert").eval()]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(0.5)

    def function_of(model: Any) -> Any:
        """Return another object in each call, as a training_step makes it."""
        scale = torch.ones(())
        if kind == "closure":
            return lambda batch: embed(model, batch, pooling="mean") * scale
        if kind == "default":
            return lambda batch, model=model: embed(model, batch, pooling="mean")
        return partial(embed, model, pooling="mean")

    step = THDStep([THDBatch.collate(EXAMPLES[:4]), THDBatch.collate(EXAMPLES[4:])])
    expected = [[info_nce(m, part, pooling="mean").item() for part in step.microbatches] for m in models]
    both = [[info_nce(function_of(m), part).item() for m in models] for part in step.microbatches]
    assert abs(expected[0][1] - expected[1][1]) > 1e-3, "the models are alike, so the test shows nothing"
    assert torch.allclose(torch.tensor(both).T, torch.tensor(expected), rtol=1e-5)


@pytest.mark.parametrize("gradients_on", [True, False])
def test_a_function_whose_option_changes_between_microbatches_is_refused(gradients_on: bool) -> None:
    model = encoder("modernbert").eval()
    step = THDStep([THDBatch.collate(EXAMPLES[:4]), THDBatch.collate(EXAMPLES[4:])])

    def run(place: int, factor: float) -> None:
        info_nce(lambda batch: embed(model, batch) * factor, step.microbatches[place], normalize=False)

    with torch.set_grad_enabled(gradients_on):
        for factor in (1.0, 2.0):  # a step that is run again begins with new caches
            run(0, factor)
            run(1, factor)
        run(0, 1.0)
        with pytest.raises(
            ValueError, match=r"microbatch 1 of a step.*A function may hold no option that changes"
        ):
            run(1, 1.1)


def test_validation_gives_the_mean_over_queries() -> None:
    model = encoder("qwen3")
    batch = THDBatch.collate(EXAMPLES)
    with torch.no_grad():
        assert info_nce(model, batch).item() == pytest.approx(info_nce(model, batch).item(), rel=1e-12)
        assert info_nce(model, THDBatch.collate([])).item() == 0.0


def test_an_empty_microbatch_gives_every_parameter_a_zero_gradient() -> None:
    model = encoder("qwen3")
    of_empty = gradients(model, info_nce(model, THDBatch.collate([])))
    assert set(of_empty) == {name for name, _ in model.named_parameters()}
    assert all(not gradient.any() for gradient in of_empty.values())


def test_bad_calls_are_named() -> None:
    model = encoder("qwen3")
    batch = THDBatch.collate(EXAMPLES)
    step = THDStep([THDBatch.collate(EXAMPLES[:4]), THDBatch.collate(EXAMPLES[4:])])
    cases: list[tuple[Any, THDBatch, dict[str, Any], str]] = [
        (model, THDBatch.collate([{"input_ids": [1, 2]}]), {}, "1 sequences without roles.*'query'"),
        (model, batch, {"temperature": -1}, "temperature=-1; wanted a finite number above 0"),
        (model, batch, {"pooling": "cls"}, "pooling='cls'; wanted one of last, mean, first"),
        (model, batch, {"dims": (64,)}, r"dims=\(64,\), but the embeddings have 32 numbers"),
        (model, step.microbatches[1], {}, "microbatch 1 of a step, but not its first one"),
        (encoder("qwen3", attention="sdpa"), batch, {}, "attn_implementation='sdpa', with which sequences"),
        (torch.zeros(3, 4), batch, {}, r"embeddings are .*\[3, 4\]; wanted floats \[21, D\]"),
    ]

    for given, wrong, options, message in cases:
        with pytest.raises(ValueError, match=message):
            info_nce(given, wrong, **options)
    with pytest.raises(TypeError, match="model is a str.*wanted a model, a function"):
        info_nce("bert", batch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="returns no last_hidden_state.*AutoModel"):
        info_nce(encoder("qwen3", head=True), batch)


def test_a_step_that_was_deleted_is_named() -> None:
    batch = THDStep([THDBatch.collate(EXAMPLES[:4]), THDBatch.collate(EXAMPLES[4:])]).microbatches[0]
    with pytest.raises(RuntimeError, match="THDStep of this microbatch was deleted.*Keep"):
        info_nce(encoder("qwen3"), batch)
