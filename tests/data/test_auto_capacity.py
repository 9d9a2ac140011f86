"""``capacity="auto"``: the largest capacity that trains, on a budget of bytes that tests choose."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_thd import Sequences, THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.data import auto_capacity
from lightning_thd.memory import MemoryModel, Training
from tests.ranks import run_ranks
from tests.strategies.jobs import strict_warnings
from tests.tiny import quiet_trainer, sequences

ROOM = 24_000_000
SAMPLES = sequences(2_000, longest=60)
CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)
TRAINING = Training(precision="32-true", device="cpu")


class Module(L.LightningModule):
    """A small model, which records the slots of its batches and the gradients that it starts with."""

    def __init__(self, most_slots: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM._from_config(CONFIG, attn_implementation="thd")
        self.register_buffer("draws", torch.zeros(1))
        self.slots: list[int] = []
        self.tried: list[int] = []
        if most_slots is not None:
            self.model.register_forward_pre_hook(self._limit(most_slots), with_kwargs=True)

    def _limit(self, most_slots: int) -> Any:
        def refuse(module: nn.Module, args: Any, kwargs: Any) -> None:
            slots = kwargs["input_ids"].shape[-1]
            self.tried.append(slots)
            if slots > most_slots:
                raise torch.OutOfMemoryError(f"{slots} slots")

        return refuse

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.slots.append(batch.input_ids.shape[-1])
        assert len(self.slots) > 1 or all(p.grad is None for p in self.model.parameters())
        loss = causal_lm_loss(self.model, batch)
        self.log("train/loss", loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def data(**options: Any) -> THDDataModule:
    return THDDataModule(SAMPLES, capacity="auto", **options)


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> int:
    """A device with 24 MB."""
    monkeypatch.setattr(auto_capacity, "_room", lambda device: ROOM)
    return ROOM


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a search prints."""
    lines: list[str] = []
    monkeypatch.setattr(auto_capacity, "rank_zero_info", lines.append)
    return lines


def predicted(room: int = ROOM) -> int:
    return MemoryModel.from_config(CONFIG).largest_capacity(room, TRAINING)


def test_the_memory_model_gives_the_capacity_and_training_uses_it(budget: int, said: list[str]) -> None:
    module = Module(most_slots=10**9)
    packs = data()
    assert packs.capacity == "auto"

    quiet_trainer(max_steps=3, log_every_n_steps=1).fit(module, packs)

    assert packs.capacity == predicted()
    assert 1000 < predicted() < sum(len(sample["input_ids"]) for sample in SAMPLES)
    assert module.tried[0] == predicted()  # the trial pack is full
    assert len(module.slots) == 3
    assert max(module.slots) <= predicted()
    assert max(module.slots) > 0.95 * predicted()
    (line,) = said
    assert re.search(rf"capacity='auto': {predicted():,} slots.* of 0.02 GB.* bounded by \w+", line)


def test_a_trial_that_runs_out_of_memory_makes_the_capacity_smaller(budget: int) -> None:
    most = int(predicted() * 0.8)
    module = Module(most_slots=most)
    packs = data()
    quiet_trainer(max_steps=1).fit(module, packs)
    assert most * 7 / 8 - 128 < packs.capacity <= most
    assert packs.capacity % 128 == 0
    trials = module.tried[: -len(module.slots)]
    assert trials == sorted(trials, reverse=True)
    assert len(trials) == 3  # 1, 7 / 8 and 49 / 64 of what was predicted


def train_twice(module: Module, packs: THDDataModule) -> dict[str, Tensor]:
    torch.manual_seed(7)
    quiet_trainer(max_steps=2).fit(module, packs)
    drawn = torch.rand(3)
    return {**{name: p.detach() for name, p in module.model.named_parameters()}, "random": drawn}


def test_the_trial_leaves_state_gradients_and_random_numbers_as_they_were(budget: int) -> None:
    actual = train_twice(Module(), data())
    expected = train_twice(Module(), THDDataModule(SAMPLES, capacity=predicted()))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def test_a_validation_before_training_finds_it_too(budget: int) -> None:
    class Validated(Module):
        def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
            causal_lm_loss(self.model, batch)

    packs = data(val=sequences(40))
    quiet_trainer(max_steps=1, num_sanity_val_steps=1).fit(Validated(), packs)
    assert packs.capacity == predicted()


def test_a_resumed_run_packs_the_same_on_another_device(
    budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = quiet_trainer(max_steps=2)
    module = Module()
    packs = data()
    trainer.fit(module, packs)
    trainer.save_checkpoint(tmp_path / "two.ckpt")

    monkeypatch.setattr(auto_capacity, "_room", lambda device: 2 * ROOM)
    resumed = Module(most_slots=10**9)
    again = data()
    quiet_trainer(max_steps=3).fit(resumed, again, ckpt_path=tmp_path / "two.ckpt", weights_only=False)
    assert again.capacity == packs.capacity == predicted()
    assert len(resumed.tried) == 1  # the third step, and no trial

    uninterrupted = Module()
    monkeypatch.setattr(auto_capacity, "_room", lambda device: ROOM)
    quiet_trainer(max_steps=3).fit(uninterrupted, data())
    assert resumed.slots == uninterrupted.slots[2:]


def test_small_data_bounds_the_capacity(budget: int, said: list[str]) -> None:
    few = sequences(30)
    packs = THDDataModule(few, capacity="auto")
    quiet_trainer(max_steps=1).fit(Module(), packs)
    total = sum(len(sample["input_ids"]) for sample in few)
    assert total <= packs.capacity < total + 128
    assert "bounded by the data, which it holds whole" in said[0]


def with_unequal_room(strategy: str) -> tuple[int, list[int]]:
    """Train on this rank, which has the more room the higher its number."""
    strict_warnings()
    auto_capacity._room = lambda device: ROOM * (1 + dist.get_rank())  # type: ignore[assignment]
    module = Module()
    packs = data(global_batch=Sequences(400) if strategy.startswith("thd") else None)
    quiet_trainer(max_steps=2, strategy=strategy, devices=2).fit(module, packs)
    assert isinstance(packs.capacity, int)
    return packs.capacity, module.slots


@pytest.mark.parametrize("strategy", ["ddp", "thd_ddp", "thd_model_parallel"])
def test_ranks_with_unequal_room_agree_on_the_smallest(strategy: str) -> None:
    of_ranks = run_ranks(with_unequal_room, 2, strategy)
    capacities = {capacity for capacity, _ in of_ranks}
    assert len(capacities) == 1
    options: dict[str, Any] = {"data": 2, "sharded": strategy == "thd_model_parallel"}
    training = Training(precision="32-true", device="cpu", accumulates=strategy != "ddp", **options)
    assert capacities == {MemoryModel.from_config(CONFIG).largest_capacity(ROOM, training)}
    assert all(max(slots) <= max(capacities) for _, slots in of_ranks)


class OnOneRank(Module):
    """Runs out of memory, or fails, on rank 1 in the forward or the backward pass of a layer."""

    def __init__(self, where: str, error: type[Exception]) -> None:
        super().__init__()
        if dist.get_rank() == 1:
            layer = self.model.model.layers[1]

            def fail(*_: object) -> None:
                raise error("on rank 1")

            if where == "forward":
                layer.mlp.register_forward_pre_hook(fail)
            else:
                layer.mlp.register_full_backward_hook(fail)


def messages_of(where: str, error: type[Exception]) -> str:
    strict_warnings()
    auto_capacity._room = lambda device: ROOM  # type: ignore[assignment]
    with pytest.raises(Exception, match=r"capacity='auto'|on rank 1") as raised:
        quiet_trainer(max_steps=1, strategy="thd_model_parallel", devices=2).fit(
            OnOneRank(where, error), data()
        )
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ranks_that_shard_a_model_leave_a_trial_together(where: str) -> None:
    """A rank that waited for the other one would end in the time limit of the job."""
    messages = run_ranks(messages_of, 2, where, torch.OutOfMemoryError, timeout_s=120.0)
    assert len(set(messages)) == 1
    expected = r"RuntimeError: capacity='auto': a trial pack of [\d,]+ slots.* on a rank.* Pass capacity=\d+"
    assert re.match(expected, messages[0]), messages


def test_an_error_of_one_rank_is_named_on_the_others() -> None:
    others, of_rank_1 = run_ranks(messages_of, 2, "forward", TypeError, timeout_s=120.0)
    assert of_rank_1 == "TypeError: on rank 1"
    assert others.startswith("RuntimeError: A trial pack of capacity='auto' failed on another rank")


def test_a_device_that_holds_no_pack_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_capacity, "_room", lambda device: 100_000)
    expected = (
        r"not even a pack of 128 slots trains. It is predicted to take 0.0\d+ GB \(.*; most of it for \w+\), "
        r"and the rank with the least memory has 0.0001 GB. Shard"
    )
    with pytest.raises(ValueError, match=expected):
        quiet_trainer(max_steps=1).fit(Module(), data())


def test_a_cpu_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match="fills the memory of a GPU, but the model is on cpu. Pass a number"
    ):
        quiet_trainer(max_steps=1).fit(Module(), data())


def test_loops_without_a_trainer_are_refused() -> None:
    packs = data(global_batch=Sequences(4))
    packs.attach(model=Module().model)
    packs.setup("fit")
    with pytest.raises(MisconfigurationException, match="needs Lightning's Trainer.*Fabric.* Pass a number"):
        packs.train_steps()


def test_an_evaluation_by_itself_is_refused(budget: int) -> None:
    class Validated(Module):
        def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
            causal_lm_loss(self.model, batch)

    with pytest.raises(
        MisconfigurationException, match="is found when training begins, and this Trainer runs"
    ):
        quiet_trainer().validate(Validated(), data(val=SAMPLES))


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity='largest'"):
        THDDataModule(SAMPLES, capacity="largest")  # type: ignore[arg-type]
