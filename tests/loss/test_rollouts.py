from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_thd.alignment import Alignment
from lightning_thd.loss import PackedRollouts
from lightning_thd.loss.preference import sequence_sums
from tests.loss.families import build


def random_rows(seed: int, rows: int = 5, columns: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Ids that may equal the pad id, a ragged mask with an empty row, and a response mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 90, (rows, columns), generator=generator)
    mask = torch.rand(rows, columns, generator=generator) < 0.6
    mask[rows // 2] = False
    mask[0, 3] = True
    response = mask & (torch.rand(rows, columns, generator=generator) < 0.6)
    return ids, mask, response


def predictable(mask: Tensor, response: Tensor) -> Tensor:
    """Response tokens with a token before them, by a loop."""
    out = torch.zeros_like(response)
    for b in range(mask.shape[0]):
        real = mask[b].nonzero().flatten().tolist()
        for n in real[1:]:
            out[b, n] = response[b, n]
    return out


def test_worked_examples() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    packed = PackedRollouts.from_padded(torch.tensor([[5, 6, 0], [0, 7, 8]]), mask)
    values = torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 4.0]])
    assert packed.pack(values, fill=-1.0).tolist() == [2.0, -1.0, 4.0, -1.0]
    assert packed.pack(values, of="token").tolist() == [1.0, 2.0, 3.0, 4.0]
    assert int(packed.pack(torch.full((2, 3), 2**24 + 1))[0]) == 2**24 + 1
    assert packed.unpack(torch.arange(1.0, 5.0)).tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 3.0]]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), multiple=st.sampled_from([1, 4]), total=st.sampled_from([1, 16]))
def test_there_and_back(seed: int, multiple: int, total: int) -> None:
    ids, mask, response = random_rows(seed)
    align = Alignment(sequence_multiple=multiple, total_multiple=max(multiple, total))
    packed = PackedRollouts.from_padded(ids, mask, response_mask=response, align=align)

    assert torch.equal(packed.unpack(torch.ones(packed.held.shape), of="token").bool(), mask)
    counted = predictable(mask, response)
    assert torch.equal(packed.counts, counted.sum(1))

    # what a slot predicts is its target, wherever it has one
    targets = packed.batch.targets
    assert torch.equal(packed.pack(ids, fill=-100)[targets != -100], targets[targets != -100])
    assert torch.equal(packed.unpack(packed.pack(ids, of="token"), of="token"), torch.where(mask, ids, 0))

    values = torch.randn(ids.shape, dtype=torch.float64)
    back = packed.unpack(packed.pack(values))
    assert torch.equal(back[counted], values[counted])
    torch.testing.assert_close(packed.sums(packed.pack(values)), (values * counted).sum(1))

    by_sequence = sequence_sums(packed.pack(values), packed.batch)
    torch.testing.assert_close(by_sequence, packed.sums(packed.pack(values))[mask.any(1)])

    means = (values * counted).sum(1) / counted.sum(1).clamp_min(1)
    torch.testing.assert_close(packed.means(packed.pack(values)), means)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-7), (torch.bfloat16, 4e-3)])
def test_sums_of_long_responses_lose_no_small_values(dtype: torch.dtype, rtol: float) -> None:
    """Added one by one in fp32, a sum above 512 swallows what is below 3e-5; in bf16 it stays at 2,048."""
    likely = torch.rand(2, 16_384, generator=torch.Generator().manual_seed(0)) ** 12 * 2
    mask = torch.ones(likely.shape, dtype=torch.long)
    packed = PackedRollouts.from_padded(torch.zeros_like(mask), mask)
    values = packed.pack(-likely.to(dtype))
    expected = -likely.to(dtype)[:, 1:].double().sum(1)
    for sums in (packed.sums(values), sequence_sums(values, packed.batch)):
        torch.testing.assert_close(sums.double(), expected, rtol=rtol, atol=0.0)


def test_model_in_one_call_equals_each_row_by_itself() -> None:
    model = build("Granite")
    ids, mask, response = random_rows(4)
    packed = PackedRollouts.from_padded(ids, mask, response_mask=response)
    logprobs = packed.logprobs(model, temperature=0.7)
    expected = torch.zeros(ids.shape, dtype=torch.float64)
    entropy = torch.zeros_like(expected)

    for b in range(len(ids)):
        slots = mask[b].nonzero().flatten()
        if not len(slots):
            continue
        logits = model(input_ids=ids[b, slots][None], use_cache=False).logits[0] / 0.7
        log_p = logits.log_softmax(-1)
        expected[b, slots[1:]] = log_p[:-1].gather(1, ids[b, slots[1:]][:, None]).squeeze(1)
        entropy[b, slots[1:]] = -(log_p.exp() * log_p).sum(-1)[:-1]

    counted = predictable(mask, response)
    assert counted.any()
    torch.testing.assert_close(logprobs.logp, expected * counted)
    torch.testing.assert_close(logprobs.entropy, entropy * counted)

    total = packed.sequence_logprobs(model, temperature=0.7)
    torch.testing.assert_close(total, (expected * counted).sum(1))

    mean = packed.sequence_logprobs(model, temperature=0.7, mean=True)
    torch.testing.assert_close(mean, (expected * counted).sum(1) / counted.sum(1).clamp_min(1))

    # a policy loss through the unpacked values, against the same through the oracle
    advantages = torch.randn(ids.shape, dtype=torch.float64)
    ours = torch.autograd.grad(
        (logprobs.logp * advantages - 0.1 * logprobs.entropy).sum(), list(model.parameters())
    )
    theirs = torch.autograd.grad(
        ((expected * advantages - 0.1 * entropy) * counted).sum(), list(model.parameters())
    )

    torch.testing.assert_close(ours, theirs)
