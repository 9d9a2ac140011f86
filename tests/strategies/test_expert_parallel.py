"""Whole experts on ranks, to which tokens are sent: every layout against one process, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_thd import Sequences, THDThroughputMonitor
from lightning_thd.callbacks.cuda_graph import _unsupported
from lightning_thd.callbacks.experts import _busiest_rank
from lightning_thd.models import prepare
from lightning_thd.parallel.experts import expert_plan
from lightning_thd.parallel.mesh import resolve_sizes
from lightning_thd.strategies import THDDDPStrategy, THDModelParallelStrategy
from tests.ranks import run_ranks
from tests.strategies.jobs import (
    Job,
    Layout,
    data,
    family_model,
    full_parameters,
    make_trainer,
    missing_dispatch,
    needs_dispatch,
    strict_warnings,
    train_by_hand,
)
from tests.strategies.test_expert_layouts import Balanced, compare
from tests.tiny import largest_error

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]  # four experts each


def over(ranks: int, **sizes: Any) -> Layout:
    """Return a layout whose experts are distributed over so many ranks."""
    return Layout(**sizes, options={"expert_parallel_size": ranks})


PAIRS = [over(2, dp=2), over(2, cp=2)]
FOURS = [
    *(over(4, dp=4), over(2, dp=4), over(2, dp=2, cp=2)),
    *(over(2, dp=2, pp=2), over(2, dp=2, tp=2), over(4, cp=2, tp=2)),
]


@needs_dispatch
def test_a_step_equals_one_process() -> None:
    compare("qwen3_moe", [(PAIRS[0], "sequence"), (PAIRS[1], "step")])


@needs_dispatch
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layouts", [PAIRS, FOURS], ids=["2", "4"])
def test_every_layout_equals_one_process(family: str, layouts: list[Layout]) -> None:
    # The "step" balance of deepseek_v3's scores is compared in tests/loss.
    balances = ("sequence",) if family == "deepseek_v3" else ("sequence", "step")
    compare(family, [(layout, balance) for layout in layouts for balance in balances])


class OneExpert(Job):
    """A model whose routers send every token to the first expert, so that one rank has them all."""

    def __init__(self, family: str = "mixtral", dtype: torch.dtype = torch.float64) -> None:
        super().__init__(family, dtype)
        for name, parameter in self.model.named_parameters():
            if name.endswith("gate.weight"):
                # Two experts a token: the first two of four, which the first of two ranks holds.
                nn.init.zeros_(parameter)
        self.model.requires_grad_(True)


def train_and_save(layout: Layout, folder: Path, kind: type[Job]) -> dict[str, Any]:
    strict_warnings()
    module = kind("mixtral")
    monitor = THDThroughputMonitor(peak=1.0, every_n_steps=1)
    trainer = make_trainer(layout, "mixtral", callbacks=[monitor], logger=False)
    trainer.fit(module, data(Sequences(12)))
    trainer.save_checkpoint(folder)
    weights: list[Any] = [p for n, p in module.model.named_parameters() if n.endswith("down_proj")]
    kept = sum(weight.to_local().numel() for weight in weights)
    return {"params": full_parameters(module.model), "held": kept, "latest": dict(monitor.latest)}


def resume(layout: Layout, folder: Path) -> dict[str, Any]:
    strict_warnings()
    module = Job("mixtral")
    monitor = THDThroughputMonitor(peak=1.0)  # Lightning warns if a callback of the checkpoint is missing
    trainer = make_trainer(layout, "mixtral", max_steps=5, callbacks=[monitor], logger=False)
    trainer.fit(module, data(Sequences(12)), ckpt_path=str(folder), weights_only=False)
    return full_parameters(module.model)


@needs_dispatch
def test_training_clips_monitors_and_resumes_in_another_layout(tmp_path: Path) -> None:
    expected = train_by_hand("mixtral", PAIRS[0], Sequences(12))["params"]
    folder = tmp_path / "step3"
    ranks = run_ranks(train_and_save, 2, PAIRS[0], folder, Job)
    for rank in ranks:
        assert largest_error(rank["params"], expected) < 1e-9
        assert 1.0 <= rank["latest"]["train/experts/busiest_rank"] <= 2.0
    weights = [p for n, p in family_model("mixtral").named_parameters() if n.endswith("down_proj")]
    assert {rank["held"] for rank in ranks} == {sum(p.numel() for p in weights) // 2}

    further = train_by_hand("mixtral", PAIRS[0], Sequences(12), steps=5)["params"]
    for parameters in run_ranks(resume, 2, Layout(cp=2), folder):
        assert largest_error(parameters, further) < 1e-9
    for parameters in run_ranks(resume, 2, PAIRS[1], folder):
        assert largest_error(parameters, further) < 1e-9


def train_with_an_idle_rank() -> dict[str, Any]:
    strict_warnings()
    module = OneExpert()
    trainer = make_trainer(PAIRS[0], "mixtral", max_steps=1, gradient_clip_val=None)
    trainer.fit(module, data(Sequences(12)))
    return {"losses": module.losses, "params": full_parameters(module.model)}


@needs_dispatch
def test_a_rank_without_tokens_does_not_hang() -> None:
    ranks = run_ranks(train_with_an_idle_rank, 2)
    assert all(np.isfinite(rank["losses"]).all() for rank in ranks)
    assert largest_error(ranks[0]["params"], ranks[1]["params"]) == 0.0
    before = dict(OneExpert().model.named_parameters())
    name = "model.layers.0.mlp.experts.down_proj"
    moved = (ranks[0]["params"][name] - before[name]).flatten(1).norm(dim=1)
    assert (moved[:2] > 0).all()  # the experts of the first rank


def refused_by_strategy(options: dict[str, Any], family: str, tile: int | None) -> str:
    layout = Layout(dp=dist.get_world_size(), options=options)
    module = Balanced(family, None) if family != "qwen3" else Job(family)
    if tile is not None:
        prepare(module.model, mlp_tile=tile)
    trainer = make_trainer(layout, family, max_steps=1, gradient_clip_val=None)
    try:
        trainer.fit(module, data(Sequences(12)))
    except (ValueError, MisconfigurationException) as error:
        return str(error)
    return ""


@needs_dispatch
@pytest.mark.parametrize(
    ("ranks", "family", "tile", "message"),
    [
        (2, "qwen3", None, "it has no plan for experts"),
        (2, "mixtral", 8, "mlp_tile=8 with expert_parallel_size=2"),
        (
            3,
            "mixtral",
            None,
            "has 4 experts, which expert_parallel_size=3 does not divide. Set it to a divisor",
        ),
    ],
)
def test_ranks_refuse_together(ranks: int, family: str, tile: int | None, message: str) -> None:
    for error in run_ranks(refused_by_strategy, ranks, {"expert_parallel_size": ranks}, family, tile):
        assert message in error


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expert_parallel_size=3, but 4 ranks hold the same layers"):
        resolve_sizes(4, expert=3)
    with pytest.raises(ValueError, match=r"a multiple of 2"):
        resolve_sizes(6, tensor=2, expert=3)
    assert resolve_sizes(8, pipeline=2, expert=4).stage == 4

    with pytest.raises(ValueError, match="which expert_parallel_size=3 does not divide"):
        expert_plan(family_model("mixtral"), 3)


@needs_dispatch
def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="context_parallel_size='dynamic'"):
        THDModelParallelStrategy(expert_parallel_size=2, context_parallel_size="dynamic")
    with pytest.raises(ValueError, match="sequence_parallel=True"):
        THDModelParallelStrategy(expert_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True)


def test_a_size_of_nothing_and_a_strategy_without_the_option_are_refused() -> None:
    with pytest.raises(ValueError, match="expert_parallel_size"):
        THDModelParallelStrategy(expert_parallel_size=0)
    with pytest.raises(TypeError, match="THDDDPStrategy has no expert_parallel_size="):
        THDDDPStrategy(expert_parallel_size=2)


def test_a_plan_whose_names_match_nothing_is_refused() -> None:
    model: Any = family_model("mixtral")
    model.ep_plan = {"model.layers.*.elsewhere": "ep_dispatch_experts"}
    with pytest.raises(ValueError, match=r"its plan \['model.layers.\*.elsewhere'\] matches no module"):
        expert_plan(model, 2)


def test_a_release_without_the_dispatch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply_of_5_22(model: Any, ep_mesh: Any, tp_mesh: Any, plan: Any) -> None: ...

    if missing_dispatch() is None:
        from transformers.distributed import expert_parallel

        monkeypatch.setattr(expert_parallel, "apply_expert_parallelism", apply_of_5_22)
    with pytest.raises(ValueError, match=r"Install 5.23 or later"):
        THDModelParallelStrategy(expert_parallel_size=2)


def test_graphs_say_that_the_dispatch_reads_the_device() -> None:
    strategy = SimpleNamespace(expert_parallel_size=2, model=None)
    reason = _unsupported(SimpleNamespace(strategy=strategy), Job())  # type: ignore[arg-type]
    assert reason == "expert_parallel_size=2 reads in every layer, from the device, where its tokens go"


def test_the_busiest_rank() -> None:
    assert _busiest_rank(np.array([[3, 1, 0, 0]]), np.array([4]), 2) == 2.0
    assert _busiest_rank(np.array([[1, 1, 1, 1, 0]]), np.array([4]), 2) == 1.0
