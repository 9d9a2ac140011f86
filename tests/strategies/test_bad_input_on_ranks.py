"""Bad input for experts, tiles, pairs and ``capacity="auto"``: one message on every rank, and none waits.

The ranks are real ones of gloo. A rank that waited for another would be killed by the time limit of its job,
which fails the test. Where ranks read other data or have other memory, only one of them has the bad input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import Sequences, THDDataModule
from lightning_thd.data import auto_capacity
from lightning_thd.data.streams import Stream
from lightning_thd.models import prepare
from tests.data.test_auto_capacity import ROOM, Module
from tests.data.test_auto_capacity import data as auto_data
from tests.loss.embedding_models import make_examples
from tests.loss.test_contrastive_ranks import Embedder
from tests.ranks import run_ranks
from tests.strategies.jobs import Job, Layout, data, make_trainer, strict_warnings
from tests.tiny import quiet_trainer

TIME_LIMIT_S = 90.0  # of a job that starts in seconds; a collective would wait for minutes
REFUSED = (ValueError, MisconfigurationException, RuntimeError)


def message_of(run: Callable[[], object]) -> str:
    """Return the message with which a run ends on this rank, or "nothing"."""
    strict_warnings()
    try:
        run()
    except REFUSED as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return "nothing"


def on_every_rank(
    job: Callable[..., str], *arguments: object, message: str, ranks: int = 2, others: str | None = None
) -> None:
    """Check that all ranks end with a message; ``others`` is the one of those without the bad input."""
    found = run_ranks(job, ranks, *arguments, timeout_s=TIME_LIMIT_S)
    for rank, said in enumerate(found):
        wanted = message if others is None or rank == ranks - 1 else others
        assert re.search(wanted, said), f"rank {rank} of {ranks} said: {said}"


# ---- Experts and tiles


def fit_experts(ranks: int, plan: dict[str, str] | None) -> str:
    module = Job("mixtral")
    if plan is not None:
        model: Any = module.model
        model.ep_plan = plan
    layout = Layout(dp=ranks, options={"expert_parallel_size": ranks})
    trainer = make_trainer(layout, "mixtral", max_steps=1, gradient_clip_val=None)
    return message_of(lambda: trainer.fit(module, data(Sequences(12))))


def test_a_number_of_experts_that_ranks_do_not_divide() -> None:
    on_every_rank(
        fit_experts,
        3,
        None,
        ranks=3,
        message="^ValueError: .* has 4 experts, which expert_parallel_size=3 does not divide. Set it to a",
    )


def test_a_plan_of_experts_whose_names_match_no_module() -> None:
    on_every_rank(
        fit_experts,
        2,
        {"model.layers.*.elsewhere": "ep_dispatch_experts"},
        message=r"^ValueError: .*plan \['model.layers.\*.elsewhere'\] matches no module. Set expert_parallel",
    )


def fit_tensor_parallel(plan: dict[str, str]) -> str:
    layout = Layout(tp=2)
    strategy = layout.make()
    strategy.tensor_parallel_plan = plan
    trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=1)
    return message_of(lambda: trainer.fit(Job(), data(Sequences(12))))


def test_a_plan_of_tensor_parallelism_whose_names_match_no_module() -> None:
    plan = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_projection": "rowwise"}
    on_every_rank(
        fit_tensor_parallel,
        plan,
        message=r"^ValueError: tensor_parallel_plan names \['model.layers.\*.mlp.down_projection'\], which "
        "match no module of Qwen3ForCausalLM. Name modules",
    )


class Tiled(Job):
    """A module that asks for tiles when a strategy lets it build its model."""

    def __init__(self, tile: int) -> None:
        super().__init__()
        self._tile = tile

    def configure_model(self) -> None:
        prepare(self.model, mlp_tile=self._tile)


def fit_tiles(tile: int) -> str:
    trainer = make_trainer(Layout(dp=2), "qwen3", max_steps=1)
    return message_of(lambda: trainer.fit(Tiled(tile), data(Sequences(12))))


def test_tiles_of_zero_tokens() -> None:
    on_every_rank(fit_tiles, 0, message=r"^ValueError: mlp_tile=0; wanted 1 or more.* tokens of a tile")


# ---- Pairs

GOOD = [
    {"query": list(one["query"]), "positive": [list(text) for text in one["positive"]]}
    for one in make_examples(24)
]
NO_QUERY = {"negative": [1, 2, 3]}
TOO_LONG = {"query": [1, 2], "positive": [[3] * 400]}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a negative without a query": (NO_QUERY, r"'negative' without a query; wanted one query. Give"),
    "a pair above the capacity": (TOO_LONG, r"is a query with its documents.*cannot be cut.*tokenizer="),
}


def fit_pairs(kind: str, bad: dict[str, Any], folder: str, strategy: str) -> str:
    """Train on pairs, one of which is bad; of a stream only the second rank reads it."""
    source: Any
    if kind == "list":
        source = [*GOOD, bad]
    elif kind == "file":
        source = f"{folder}/pairs.jsonl"
    else:
        source = Stream(source=f"{folder}/part-*.jsonl", window=8)
    pairs = THDDataModule(
        source,
        capacity=256,
        global_batch=Sequences(8),
        oversize="truncate",
        cache_dir=None if kind == "stream" else f"{folder}/cache",
    )
    trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=6)
    return message_of(lambda: trainer.fit(Embedder(), pairs))


@pytest.mark.parametrize("strategy", ["thd_ddp", "thd_model_parallel"])
@pytest.mark.parametrize("kind", ["list", "file", "stream"])
@pytest.mark.parametrize("name", list(BAD))
def test_bad_pairs(name: str, kind: str, strategy: str, tmp_path: Path) -> None:
    bad, message = BAD[name]
    lines = [json.dumps(one) for one in GOOD]
    (tmp_path / "pairs.jsonl").write_text("\n".join([*lines, json.dumps(bad)]))
    (tmp_path / "part-0.jsonl").write_text("\n".join(lines[::2]))
    (tmp_path / "part-1.jsonl").write_text("\n".join([*lines[1::2], json.dumps(bad)]))
    on_every_rank(fit_pairs, kind, bad, str(tmp_path), strategy, message=message)


# ---- A capacity that no card holds


def fit_auto_capacity(strategy: str, rooms: tuple[int, int]) -> str:
    auto_capacity._room = lambda device: rooms[dist.get_rank()]  # type: ignore[assignment]
    step = Sequences(400) if strategy.startswith("thd") else None
    trainer = quiet_trainer(max_steps=1, strategy=strategy, devices=2)
    return message_of(lambda: trainer.fit(Module(), auto_data(global_batch=step)))


@pytest.mark.parametrize("strategy", ["ddp", "thd_ddp", "thd_model_parallel"])
@pytest.mark.parametrize("rooms", [(100_000, 100_000), (ROOM, 100_000)], ids=["no card", "not the second"])
def test_a_capacity_that_no_card_holds(strategy: str, rooms: tuple[int, int]) -> None:
    on_every_rank(
        fit_auto_capacity,
        strategy,
        rooms,
        message=r"^ValueError: .*not even a pack of 128 slots trains.* least memory has 0.0001 GB. Shard the",
    )
