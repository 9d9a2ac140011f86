"""Accelerate and Fabric loops whose ranks share packs equal the hand-written loop over whole sequences."""

from __future__ import annotations

from typing import Any

import accelerate
import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import Packs, Sequences, THDDataModule, causal_lm_loss
from lightning_thd.integrations import PackedLoop, prepare_fabric, prepare_thd
from tests.integrations.support import CAPACITY, STEPS, by_hand, make_data, run, same
from tests.ranks import run_ranks
from tests.tiny import TinyModule, sequences, tiny_llama


def make_loop(engine: str, step: Any, size: int, **options: Any) -> PackedLoop:
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=TinyModule().lr, momentum=0.9)
    options.setdefault("data", make_data(step))
    data = options.pop("data")
    if engine == "accelerate":
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        accelerator = accelerate.Accelerator(cpu=True)
        return prepare_thd(
            accelerator, model, data, optimizer, scheduler, peak=1e9, context_parallel_size=size, **options
        )
    fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    loop = prepare_fabric(fabric, model, data, optimizer, peak=1e9, context_parallel_size=size, **options)
    loop.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return loop


def trained(engine: str, step: Any, size: int, options: dict[str, Any]) -> Any:
    loop = make_loop(engine, step, size, **options)
    params, losses, seen = run(loop, STEPS)
    val = THDDataModule(capacity=CAPACITY, val=sequences(20, labels=True, seed=5))
    return params, losses, seen, loop.evaluate(val), loop.latest


def whole_loss(params: dict[str, torch.Tensor]) -> tuple[float, int]:
    """Mean loss of the evaluation set without packs."""
    from tests.tiny import nll

    model = tiny_llama()
    model.load_state_dict({**model.state_dict(), **params})
    with torch.no_grad():
        results = [nll(model, sample) for sample in sequences(20, labels=True, seed=5)]
    tokens = int(sum(count for _, count in results))
    return float(sum(total for total, _ in results)) / tokens, tokens


@pytest.mark.parametrize(
    ("engine", "world", "size", "step", "options"),
    [
        ("accelerate", 4, 2, Sequences(12), {}),
        (
            "fabric",
            2,
            2,
            Packs(1),
            {"context_parallel_layout": "striped", "context_parallel_communication": "ring"},
        ),
        pytest.param(
            "accelerate",
            2,
            2,
            Sequences(12),
            {"context_parallel_communication": "needed"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_that_share_packs_equal_the_hand_loop(
    engine: str, world: int, size: int, step: Any, options: dict[str, Any]
) -> None:
    ranks = run_ranks(trained, world, engine, step, size, options)
    wanted, expected = by_hand(step, world // size)
    for params, _, _, found, _ in ranks:
        assert same(params, wanted)
        loss, tokens = whole_loss(params)
        assert found == {"val/loss": pytest.approx(loss, rel=1e-12), "val/loss_tokens": tokens}
    means = [sum(losses) / world for losses in zip(*(rank[1] for rank in ranks), strict=True)]
    assert means == pytest.approx(expected, rel=1e-12)
    for at in range(0, world, size):
        assert all(ranks[at + i][2] == ranks[at][2] for i in range(size))  # the same packs
        assert all(ranks[at + i][1] == ranks[at][1] for i in range(size))  # and their loss
    assert world == size or ranks[0][2] != ranks[-1][2]


def refusals() -> None:
    with pytest.raises(ValueError, match="context_parallel_size=3 does not divide the 2 ranks"):
        make_loop("accelerate", Sequences(12), 3)
    with pytest.raises(TypeError, match="context_parallel_size is a str, 'dynamic'.*THDDDPStrategy"):
        make_loop("accelerate", Sequences(12), "dynamic")  # type: ignore[arg-type]
    ready = make_data(Sequences(12))
    ready.attach()
    ready.setup("fit")
    with pytest.raises(ValueError, match="got a ready THDLoader with context_parallel_size=2"):
        make_loop("accelerate", Sequences(12), 2, data=ready.train_steps())
    loop = make_loop("accelerate", Sequences(12), 2)
    with pytest.raises(ValueError, match=r"capture\(\) with context_parallel_size=2"):
        loop.capture()
    blind = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64))

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        logits = model(batch.input_ids)
        return torch.nn.functional.cross_entropy(logits, batch.targets, ignore_index=-100)

    optimizer = torch.optim.SGD(blind.parameters(), lr=0.1)
    loop = prepare_thd(
        accelerate.Accelerator(cpu=True),
        blind,
        make_data(Sequences(12)),
        optimizer,
        loss_fn=loss_fn,
        peak=1e9,
        context_parallel_size=2,
    )
    with pytest.raises(MisconfigurationException, match="without calling varlen_attention"):
        loop.backward(next(iter(loop.loader)))
    other = tiny_llama()
    other.set_attn_implementation("sdpa")
    with pytest.raises(MisconfigurationException, match=r"'sdpa'\) sees only the shard"):
        prepare_thd(
            accelerate.Accelerator(cpu=True),
            other,
            make_data(Sequences(12)),
            torch.optim.SGD(other.parameters(), lr=0.1),
            loss_fn=causal_lm_loss,
            context_parallel_size=2,
        )


def test_refusals() -> None:
    run_ranks(refusals, 2)
