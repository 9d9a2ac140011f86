"""Bad input for experts, tiles, stages, pairs and ``capacity="auto"``: one message on every rank.

The ranks are real ones of gloo. No rank waits for another: the time limit of its job would kill it, and fail
the test. Where ranks read other data or have other memory, only one of them has the bad input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_thd import Sequences, THDDataModule
from lightning_thd.data import auto_capacity
from lightning_thd.data.streams import Stream
from lightning_thd.models import prepare
from tests.data.test_auto_capacity import ROOM, Module
from tests.data.test_auto_capacity import data as auto_data
from tests.loss.embedding_models import make_examples
from tests.loss.test_contrastive_ranks import Embedder
from tests.ranks import run_ranks
from tests.strategies.jobs import (
    INTERLEAVED,
    Job,
    Layout,
    data,
    make_trainer,
    needs_dispatch,
    strict_warnings,
)
from tests.tiny import quiet_trainer, sequences

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


@needs_dispatch
def test_a_number_of_experts_that_ranks_do_not_divide() -> None:
    on_every_rank(
        fit_experts,
        3,
        None,
        ranks=3,
        message="^ValueError: .* has 4 experts, which expert_parallel_size=3 does not divide. Set it to a",
    )


@needs_dispatch
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


# ---- Stages


class Pair(nn.Module):
    """A layer that returns more than hidden states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, **options: Any) -> Any:
        return self.layer(hidden, **options), hidden


def share_a_weight(model: Any) -> None:
    first, *_, last = model.model.layers
    last.mlp.up_proj.weight = first.mlp.up_proj.weight


def return_a_pair(place: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.layers[place] = Pair(model.model.layers[place])

    return change


def run_out_of_memory(model: Any) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for this layer")

    model.model.layers[-1].register_forward_hook(fail)


PAIR = "^ValueError: Pair returns a tuple of Tensor, Tensor; wanted only the hidden states"
# A change to a model of four layers, the options, the ranks, and the message.
UNCUTTABLE: dict[str, tuple[Callable[[Any], None], dict[str, Any], int, str]] = {
    "a shared weight": (share_a_weight, {}, 2, "^ValueError: Layers 0 and 3 of .* share mlp.up_proj"),
    "a pair from the first rank": (return_a_pair(0), {}, 2, PAIR),
    "a pair from the last rank": (return_a_pair(-1), {}, 2, PAIR),
    "a pair from the first of four": (return_a_pair(0), {}, 4, PAIR),
    "a pair from the second of four": (return_a_pair(1), {}, 4, PAIR),
    "a pair from the first rank, interleaved": (return_a_pair(0), INTERLEAVED, 2, PAIR),
    "a pair from the last rank, interleaved": (return_a_pair(1), INTERLEAVED, 2, PAIR),
    "a pair from the first rank's second stage": (return_a_pair(2), INTERLEAVED, 2, PAIR),
    "a pair from the last rank's second stage": (return_a_pair(3), INTERLEAVED, 2, PAIR),
    "no memory on the last of four": (run_out_of_memory, {}, 4, "Error: .*no room for this layer"),
}


def fit_stages(name: str) -> str:
    change, options, ranks, _ = UNCUTTABLE[name]
    module = Job("qwen3@4")
    change(module.model)
    trainer = make_trainer(Layout(pp=ranks, options=options), max_steps=1)
    message = message_of(lambda: trainer.fit(module, data(Sequences(20))))
    assert trainer.global_step == 0
    return message


@pytest.mark.parametrize("name", UNCUTTABLE)
def test_a_model_that_cannot_be_cut(name: str) -> None:
    _, _, ranks, message = UNCUTTABLE[name]
    on_every_rank(fit_stages, name, ranks=ranks, message=message)


def validate_stages(name: str) -> str:
    change, options, ranks, _ = UNCUTTABLE[name]
    module = Job("qwen3@4")
    change(module.model)
    trainer = make_trainer(Layout(pp=ranks, options=options))
    return message_of(lambda: trainer.validate(module, data(Sequences(20), val=sequences(20, labels=True))))


@pytest.mark.parametrize("name", ["a pair from the first of four", "a pair from the second of four"])
def test_a_model_that_cannot_be_cut_and_is_evaluated_first(name: str) -> None:
    on_every_rank(validate_stages, name, ranks=4, message=PAIR)


def fit_layers(family: str, options: dict[str, Any]) -> str:
    trainer = make_trainer(Layout(pp=2, options=options), max_steps=1)
    return message_of(lambda: trainer.fit(Job(family), data(Sequences(20))))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("qwen3", INTERLEAVED, "^ValueError: .* makes 4 stages, but the model has 2 layers"),
        ("qwen3@4", {"pipeline_split": [1, 2, 1]}, "^ValueError: .* gives 3 stages 4 layers; wanted 2"),
    ],
)
def test_stages_that_do_not_fit_the_layers(family: str, options: dict[str, Any], message: str) -> None:
    on_every_rank(fit_layers, family, options, message=message)


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
