"""A checkpoint of one layout goes on in another, as one process would, and leaves as plain weights."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader

from lightning_thd import Sequences, THDBatch, THDModelParallelStrategy
from lightning_thd.strategies.checkpoints import Checkpoints, by_index, by_name
from tests.ranks import RankError, pretended_ranks, run_ranks
from tests.rows import error_or, run_row
from tests.strategies.jobs import Job, Layout, data, full_parameters, make_trainer
from tests.tiny import largest_error

STEPS = 3  # weights that were resumed without Adam's state would differ by 1e-2
SAVED = 2


class Grouped(Job):
    """Has groups in another order than the module's, weights outside of them, and one not yet trained."""

    def __init__(self) -> None:
        super().__init__()
        self.model.model.embed_tokens.requires_grad_(False)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.trainer.global_step < SAVED:  # without a gradient, and so without a state in the checkpoint
            self.model.model.norm.weight.grad = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        norms = [parameter for parameter in trained if parameter.ndim == 1]
        others = [parameter for parameter in reversed(trained) if parameter.ndim > 1]
        groups = [{"params": norms, "lr": 2e-2, "weight_decay": 0.0}, {"params": others}]
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-5, weight_decay=0.1)


PLACES = {
    "ddp cp2": Layout(strategy="thd_ddp", cp=2),
    "ddp": Layout(strategy="thd_ddp", dp=2),
    "dp2": Layout(dp=2),
    "cp2": Layout(cp=2),
    "tp2": Layout(tp=2),
    "replicas": Layout(dp=2, options={"data_parallel_replicas": 2}),
    "dp2 cp2": Layout(dp=2, cp=2),
    "cp2 tp2": Layout(cp=2, tp=2),
    "one": Layout(strategy="thd_ddp"),
}


def fit(layout: Layout, saves: str = "", goes_on: str | None = None, **options: Any) -> L.Trainer:
    """Train on this rank, with checkpoints in a folder and from another."""
    warnings.filterwarnings("ignore")
    last = "asynchronous_checkpoints" in layout.options
    how: Any = {"every_n_train_steps": SAVED, "save_top_k": -1, "save_last": last}
    savers = [ModelCheckpoint(saves, filename="{step}", **how)] if saves else []
    defaults = {"callbacks": savers, "enable_checkpointing": bool(saves), "max_steps": STEPS}
    module = Grouped()
    compiles = options.pop("compiles", False)
    module.model = torch.compile(module.model, backend="eager") if compiles else module.model
    trainer = make_trainer(layout, **{**defaults, **options})
    trainer.fit(module, data(Sequences(12)), ckpt_path=goes_on)
    return trainer


def weights(layout: Layout, saves: str = "", goes_on: str | None = None, **options: Any) -> dict[str, Any]:
    module: Any = fit(layout, saves, goes_on, **options).lightning_module
    return full_parameters(module.model)


def written(source: str, folder: str) -> dict[str, Any]:
    return weights(PLACES[source], f"{folder}/{source}")


def resumed(way: tuple[str, str], folder: str) -> dict[str, Any]:
    return weights(PLACES[way[1]], goes_on=f"{folder}/{way[0]}/step={SAVED}.ckpt")


def check_ways(ways: list[tuple[str, str]], folder: Path) -> None:
    """Write every source once and read it in every target, all of a number of ranks in one start of them."""
    expected = {}
    for world in (1, 2, 4):
        cells = [cell for cell in dict.fromkeys(a for a, _ in ways) if PLACES[cell].world == world]
        for cell, outcomes in zip(cells, run_row(written, world, cells, str(folder)), strict=True):
            assert outcomes[0].error is None, (cell, outcomes[0].error)
            expected[cell] = outcomes[0].value
            assert (folder / cell / f"step={SAVED}.ckpt").is_dir() == (PLACES[cell].strategy != "thd_ddp")

    faults = []
    for world in (1, 2, 4):
        into = [way for way in ways if PLACES[way[1]].world == world]
        for way, outcomes in zip(into, run_row(resumed, world, into, str(folder)), strict=True):
            compare = partial(largest_error, wanted=expected[way[0]])
            errors = [error_or(outcome, compare) for outcome in outcomes]
            # Other layouts pad other packs: the same sums in another order.
            faults += [(way, e) for e in errors if isinstance(e, str) or not e < 1e-10]

    assert not faults, "\n".join(f"{way}: {error}" for way, error in faults)


def other_models(folder: str) -> None:
    trainer = fit(PLACES["dp2"], folder, max_steps=SAVED)
    unknown = "lacks.*layers.1"
    missing = "Missing key"
    batches = DataLoader(2 * [THDBatch.collate([{"input_ids": [1, 2, 3]}])], batch_size=None)
    for depth, strict, error in ((2, 1, ""), (1, 1, unknown), (1, 0, ""), (3, 1, missing), (3, 0, "")):
        other = Job(f"qwen3@{depth}t")  # which this Trainer has not trained
        other.strict_loading = bool(strict)
        with pytest.raises(BaseException, match=error) if error else nullcontext():
            trainer.predict(other, batches, ckpt_path=f"{folder}/step={SAVED}.ckpt")


def test_folders_load_into_whole_weights_and_files_into_shards(tmp_path: Path) -> None:
    check_ways([("tp2", "ddp cp2"), ("ddp cp2", "dp2")], tmp_path)
    run_ranks(other_models, 2, str(tmp_path))


@pytest.mark.slow
def test_every_layout_into_every_other(tmp_path: Path) -> None:
    check_ways([(a, b) for a in PLACES for b in PLACES], tmp_path)


def compiled(folder: str) -> list[dict[str, Any]]:
    trainer: Any = fit(PLACES["dp2"], folder, max_steps=SAVED, compiles=True)
    trainer.strategy.save_pretrained(f"{folder}/exported")
    ways = [("dp2", False), ("dp2", True), ("ddp", True)]
    goes_on = f"{folder}/step={SAVED}.ckpt"
    trainers: list[Any] = [trainer, *(fit(PLACES[a], goes_on=goes_on, compiles=b) for a, b in ways)]
    models = (x.lightning_module.model for x in trainers)
    return [full_parameters(getattr(model, "_orig_mod", model)) for model in models]


@pytest.mark.slow
def test_compiled_models_resume_and_leave_as_a_plain_file_and_a_hugging_face_folder(tmp_path: Path) -> None:
    whole, expected, *resumed = run_ranks(compiled, 2, str(tmp_path))[0]
    assert max(largest_error(of_rank, expected) for of_rank in resumed) < 1e-10
    dcp_to_torch_save(tmp_path / f"step={SAVED}.ckpt", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")["state_dict"]
    assert largest_error({name.removeprefix("model."): v for name, v in plain.items()}, whole) == 0.0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    assert largest_error(full_parameters(model), whole) == 0.0


class SavesFirst(Callback):
    """Saves a checkpoint before the first step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def begun(cell: tuple[str, str | None], folder: str) -> dict[str, Any]:
    """Train with a checkpoint before the first step, or from such a one."""
    place, source = cell
    if source is not None:
        return weights(PLACES[place], goes_on=f"{folder}/{source}.ckpt")
    return weights(PLACES[place], callbacks=[SavesFirst(f"{folder}/{place}.ckpt")])


BEGUN: Any = [("dp2", None), ("tp2", "dp2"), ("ddp", None), ("dp2", "ddp"), ("ddp", "dp2")]


@pytest.mark.parametrize("cells", [BEGUN[:2], pytest.param(BEGUN, marks=pytest.mark.slow)])
def test_a_checkpoint_before_the_first_step_counts_no_step(cells: Any, tmp_path: Path) -> None:
    [expected] = run_ranks(written, 1, "one", str(tmp_path))
    for cell, outcomes in zip(cells, run_row(begun, 2, cells, str(tmp_path)), strict=True):
        for outcome in outcomes:
            assert outcome.error is None, (cell, outcome.error)
            assert largest_error(outcome.value, expected) < 1e-10, cell


def test_states_of_other_parameters_are_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    whole = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    whole.step()
    part = torch.optim.Adam(module[0].parameters())

    with pytest.raises(ValueError, match=r"groups of \[4\] parameters, but this optimizer has groups of \[2"):
        by_name(whole.state_dict(), part, module)
    named = by_name(whole.state_dict(), whole, module)
    assert list(named["state"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]

    # Lightning's own strategy numbers by the module, in ascending order: here without the first weight.
    state = {"state": {3: "b", 1: "a"}, "param_groups": [{"lr": 1.0, "params": [3]}, {"params": [1]}]}
    theirs = torch.optim.Adam([{"params": [module[1].bias]}, {"params": [module[0].bias]}])
    assert by_name(state, theirs, module)["state"] == {"1.bias": "b", "0.bias": "a"}
    assert by_index(state, theirs, module)["state"] == {0: "b", 1: "a"}
    with pytest.raises(ValueError, match=r"states of 2 parameters that the optimizer does not hold, \['1"):
        by_index(named, part, module)

    part.step()
    with pretended_ranks(2):
        shard = distribute_tensor(torch.ones(2), dist.init_device_mesh("cpu", (2,)), src_data_rank=None)
        with pytest.raises(ValueError, match=r"holds a DTensor, of which only the first"):
            Checkpoints(THDModelParallelStrategy()).save(print, {"callbacks": [shard]}, "", None)

    fsdp = FSDPStrategy()  # whose numbers are not those of its flat parameters
    seen = list[Any]()
    fsdp._optimizers = [part]  # type: ignore[assignment]
    fsdp._lightning_module = module
    checkpoint = {"optimizer_states": [{"state": {}, "param_groups": [{"params": [9, 0]}, {"params": [1]}]}]}
    Checkpoints(fsdp).load_optimizers(seen.append, checkpoint)

    assert seen == [checkpoint]
    with pytest.raises(ValueError, match=r"holds 2 parameters that the checkpoint's optimizer did not, \['1"):
        by_index(by_name(part.state_dict(), part, module), whole, module)


BEHIND = Layout(dp=2, options={"asynchronous_checkpoints": True})


def break_a_write(kind: str) -> None:
    """Make every checkpoint take longer than a step, and one of them end its rank, or fail."""
    write = FileSystemWriter.write_data
    calls = [0]
    broken_call = 2 if kind != "kill" or dist.get_rank() == 1 else -1

    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        time.sleep(0.5)
        if calls[0] == broken_call and kind == "kill":
            time.sleep(2.0)  # training is over by now, had it not to wait
            os._exit(9)
        if calls[0] == broken_call and kind == "fail":
            raise OSError("no space left on device")
        return write(self, *args, **kwargs)

    FileSystemWriter.write_data = late  # type: ignore[method-assign]


def behind(kind: str, folder: str) -> dict[str, Any]:
    if kind == "plugin":
        return weights(Layout(dp=2), folder, max_steps=5, plugins=[AsyncCheckpointIO()])
    break_a_write(kind)
    return weights(BEHIND, folder, max_steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slow", "plugin"])
def test_a_checkpoint_holds_what_it_was_begun_with(kind: str, tmp_path: Path) -> None:
    first, _ = run_ranks(behind, 2, kind, str(tmp_path))
    names = ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == (names if kind == "slow" else names[1:])
    assert max(largest_error(of_rank, first) for of_rank in run_ranks(go_on, 2, str(tmp_path))) < 1e-12


def best(folder: str) -> list[dict[str, Any]]:
    break_a_write("slow")
    savers = []
    for layout in (Layout(dp=2), BEHIND):
        how: Any = {"monitor": "train/loss", "save_top_k": 2, "every_n_train_steps": 1}
        savers.append(ModelCheckpoint(f"{folder}/{len(savers)}", "best", **how))
        fit(layout, callbacks=savers[-1:], enable_checkpointing=True)
    return [saver.best_k_models for saver in savers]


def test_a_checkpoint_being_written_keeps_its_name(tmp_path: Path) -> None:
    expected, actual = (
        {torch.load(f"{path}/meta.pt", weights_only=False)["global_step"]: v for path, v in kept.items()}
        for kept in run_ranks(best, 2, str(tmp_path))[0]
    )
    assert actual == expected


def go_on(folder: str) -> dict[str, Any]:
    return weights(BEHIND, goes_on=f"{folder}/step=2.ckpt", max_steps=5)


def test_a_kill_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank"):
        run_ranks(behind, 2, "kill", str(tmp_path))
    assert not (tmp_path / "last.ckpt").exists()
    whole, _ = run_ranks(behind, 2, "plugin", str(tmp_path / "whole"))
    assert max(largest_error(of_rank, whole) for of_rank in run_ranks(go_on, 2, str(tmp_path))) < 1e-10


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"no space left on device"):
        run_ranks(behind, 2, "fail", str(tmp_path))
    assert (tmp_path / "step=2.ckpt").is_dir()
