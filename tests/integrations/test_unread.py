"""A model that was not ported is refused at its first pack, in every integration."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import Trainer, TrainingArguments

from lightning_thd import (
    CUDAGraphCallback,
    Sequences,
    THDBatch,
    THDDataModule,
    THDDDPStrategy,
    causal_lm_loss,
    varlen_attention,
)
from lightning_thd import THDThroughputMonitor as Monitor
from lightning_thd.batch.noted import FirstStep, NotedBatch, UnreadBoundariesError, unnoted
from lightning_thd.integrations import packed_trainer
from lightning_thd.loss import preference
from lightning_thd.warnings import THDWarning
from tests.integrations.support import make_loop
from tests.integrations.unported import Module, Own, loss_of
from tests.ranks import run_ranks
from tests.tiny import quiet_trainer, sequences, tiny_llama

CAPACITY = 48
REFUSED = "did not ask where they begin"
LOOPS = ("accelerate", "fabric")


def data(**options: Any) -> THDDataModule:
    rows = sequences(40)
    return THDDataModule(
        rows, **{"capacity": CAPACITY, "val": rows, "test": rows, "predict": rows, **options}
    )


def fit(ported: bool, *callbacks: Any, module: Any = None, **options: Any) -> Any:
    module = Module(ported) if module is None else module
    settings = {"max_steps": 3, "limit_val_batches": 0, "callbacks": list(callbacks)}
    of_data = {key: options.pop(key) for key in ("needs_boundaries", "global_batch") if key in options}
    quiet_trainer(**{**settings, **options}).fit(module, datamodule=data(**of_data))
    return module


# Models that see the whole pack run where boundaries are said to be needless, and the monitor warns of them.
measured_anyway = pytest.mark.filterwarnings("ignore:scaled_dot_product_attention of .* ran over all")

# ---- the batch


@pytest.fixture
def noted() -> NotedBatch:
    return NotedBatch.of(THDBatch.collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]))


ASKING: list[Callable[[THDBatch], Any]] = [
    lambda batch: batch.boundaries,
    lambda batch: batch.cu_seqlens,
    lambda batch: batch.cu_seqlens_padded,
    lambda batch: batch.position_ids,
    lambda batch: batch.lengths,
    lambda batch: batch.padded_lengths,
    lambda batch: batch.token_sequences(),
    lambda batch: batch.hf_kwargs(),
    lambda batch: batch.unpack(batch.input_ids),
    lambda batch: batch.to("meta").boundaries,
    lambda batch: batch.replace(set_name="x").boundaries,
]
OTHERS: list[Callable[[THDBatch], Any]] = [
    len,
    repr,
    list,
    lambda batch: batch.to("meta"),
    lambda batch: batch.replace(set_name="x"),
    lambda batch: batch.pool(batch.input_ids),
    lambda batch: batch.targets,
    lambda batch: batch.token_targets,
    lambda batch: batch.predictions,
    lambda batch: batch.stats,
    lambda batch: batch.max_seqlen,
    lambda batch: batch.loss_scale,
    lambda batch: batch.prefixes,
    lambda batch: preference.sequence_sums(batch.input_ids.float(), batch),
    copy.copy,
]


@pytest.mark.parametrize("ask", range(len(ASKING)))
def test_each_way_to_ask_is_noted(noted: NotedBatch, ask: int) -> None:
    """A step that does one of these passes."""

    def step(batch: THDBatch) -> None:
        ASKING[ask](batch)
        batch.input_ids  # noqa: B018

    FirstStep(step, what="step", option="x")(unnoted(noted))


@pytest.mark.parametrize("other", range(len(OTHERS)))
def test_other_reads_are_not(noted: NotedBatch, other: int) -> None:
    def step(batch: THDBatch) -> None:
        OTHERS[other](batch)
        batch.input_ids  # noqa: B018

    with pytest.raises(UnreadBoundariesError, match=REFUSED):
        FirstStep(step, what="step", option="x")(unnoted(noted))


def test_a_noted_batch_answers_as_the_plain_one(noted: NotedBatch) -> None:
    plain = unnoted(noted)
    for name in dir(THDBatch):
        if name.startswith("_") or callable(getattr(plain, name)):
            continue
        mine = getattr(noted, name)
        theirs = getattr(plain, name)
        assert mine is theirs or str(mine) == str(theirs), name
    assert str(pickle.loads(pickle.dumps(noted)).boundaries) == str(plain.boundaries)


def test_packs_of_one_sequence_and_packs_that_nobody_ran_are_not_judged() -> None:
    """They say nothing; the next pack of several sequences does."""
    one = THDBatch.collate([{"input_ids": [5, 6, 7]}])
    two = THDBatch.collate([{"input_ids": [5, 6]}, {"input_ids": [7]}])
    step = FirstStep(lambda batch, run: batch.input_ids if run else None, what="step", option="x")
    step(one, True)
    step(two, False)
    with pytest.raises(UnreadBoundariesError):
        step(two, True)
    with pytest.raises(UnreadBoundariesError):  # a second call finds the same fault
        step(two, True)
    with pytest.raises(UnreadBoundariesError):
        FirstStep(lambda batches: batches["a"][0].input_ids, what="step", option="x")({"a": [two]})


# ---- the integrations


def test_lightning_refuses_the_first_training_step() -> None:
    module = Module(False)
    with pytest.raises(
        UnreadBoundariesError, match=r"Module.training_step .*THDDataModule\(needs_boundaries"
    ):
        fit(False, module=module)
    assert "training_step" not in vars(module)
    assert not fit(True).__dict__.keys() & {"training_step", "validation_step"}
    fit(False, needs_boundaries=False)


class HalfPorted(nn.Module):
    """Reads positions; ``kind`` says how its attention runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.tokens = nn.Embedding(64, 16)
        self.positions = nn.Embedding(64, 16)
        self.head = nn.Linear(16, 64)

    def forward(self, batch: THDBatch) -> torch.Tensor:
        x = self.tokens(batch.input_ids) + self.positions(batch.position_ids)
        logits: torch.Tensor = self.head(x + self.attend(x, batch))
        return logits

    def attend(self, x: torch.Tensor, batch: THDBatch) -> torch.Tensor:
        attention = F.scaled_dot_product_attention
        if self.kind in ("causal", "full"):  # these leak
            row = x[None, None]
            return attention(row, row, row, is_causal=self.kind == "causal")[0, 0]
        if self.kind == "mask":
            of = (batch.position_ids == 0).cumsum(0)  # the document of each slot
            mask = (of[:, None] == of).tril()
            row = x[None, None]
            return attention(row, row, row, attn_mask=mask)[0, 0]
        if self.kind == "each":
            each = [row[None, None] for row in batch.unpack(x)]
            return torch.cat([attention(row, row, row, is_causal=True)[0, 0] for row in each])
        if self.kind == "nested":
            rows = torch.nested.nested_tensor_from_jagged(x[:, None], batch.cu_seqlens).transpose(1, 2)
            out: torch.Tensor = attention(rows, rows, rows).transpose(1, 2).values()
            return out[:, 0]
        if self.kind == "flex":
            of = (batch.position_ids == 0).cumsum(0)  # the document of each slot
            size = len(x)
            mask = create_block_mask(
                lambda b, h, i, j: (of[i] == of[j]) & (i >= j), 1, 1, size, size, device="cpu"
            )
            row = x[None, None]
            return flex_attention(row, row, row, block_mask=mask)[0, 0]
        heads = x[:, None]
        if self.kind == "of_heads":  # every slot attends over its own heads
            return attention(heads, heads, heads)[:, 0]
        return varlen_attention(heads, heads, heads, batch.boundaries)[:, 0]


class HalfPortedModule(Module):
    def __init__(self, kind: str) -> None:
        super().__init__(True)
        self.model = HalfPorted(kind)


@pytest.mark.parametrize("kind", ["causal", "full"])
def test_positions_without_attention_by_document_are_refused(kind: str) -> None:
    """The model asked for positions, but torch's attention sees the whole row; the message says so."""
    message = (
        r"HalfPortedModule.training_step ran scaled_dot_product_attention over all 4\d slots .*\[T, H, D\]"
    )
    with pytest.raises(UnreadBoundariesError, match=message):
        fit(False, module=HalfPortedModule(kind))
    with pytest.raises(UnreadBoundariesError, match="validation_step ran scaled_dot_product_attention"):
        quiet_trainer().validate(HalfPortedModule(kind), datamodule=data())
    fit(False, module=HalfPortedModule(kind), needs_boundaries=False)


@pytest.mark.parametrize("kind", ["mask", "each", "nested", "flex", "of_heads", "varlen"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_attention_that_keeps_documents_apart_is_not_refused(kind: str) -> None:
    """Each of these gives every document what it gives the document by itself, and passes."""
    model = HalfPorted(kind)
    samples = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [3, 4, 5, 6]}]
    done: list[bool] = []
    step = FirstStep(model, what="step", option="x", passed=lambda: done.append(True))
    packed = step(THDBatch.collate(samples))
    alone = torch.cat([model(THDBatch.collate([sample])) for sample in samples])
    torch.testing.assert_close(packed, alone)
    assert done == [True]


def test_one_sequence_in_a_row_may_use_attention_over_the_row() -> None:
    one = THDBatch.collate([{"input_ids": [5, 6, 7]}], pad_to=8)
    step = FirstStep(HalfPorted("causal"), what="step", option="x")
    step(one)
    two = THDBatch.collate([{"input_ids": [5, 6]}, {"input_ids": [7]}])
    with pytest.raises(UnreadBoundariesError, match="over all 3 slots of a pack of 2 sequences"):
        step(two)


Labels = Callable[[THDBatch, torch.Tensor], torch.Tensor]
WRONG_LABELS: dict[str, Labels] = {
    r"input_ids\[1:\] as labels, so the end": lambda b, y: F.cross_entropy(y[:-1], b.input_ids[1:]),
    "targets.* shifted twice": lambda b, y: nn.CrossEntropyLoss()(y[None, :-1].mT, b.targets[None, 1:]),
    "its own logits": lambda b, y: F.cross_entropy(y, b.input_ids, reduction="sum") * b.loss_scale,
}
RIGHT_LABELS: dict[str, Labels] = {
    "targets": lambda b, y: F.cross_entropy(y, b.targets),
    "masked after": lambda b, y: (
        F.cross_entropy(y[:-1], b.input_ids[1:], reduction="none") * (b.position_ids[1:] > 0)
    ).sum(),
    "masked ids": lambda b, y: F.cross_entropy(y, b.input_ids.where(b.position_ids % 2 == 0, -100)),
    "each": lambda b, y: sum(
        (
            F.cross_entropy(of[:-1], ids[1:])
            for of, ids in zip(b.unpack(y), b.unpack(b.input_ids), strict=True)
        ),
        start=torch.zeros(()),
    ),
}


class WithLabels(Module):
    def __init__(self, loss: Labels) -> None:
        super().__init__(True)
        self.loss = loss

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, self.model(batch))


@pytest.mark.parametrize("fault", WRONG_LABELS)
def test_labels_that_are_not_the_next_tokens_of_a_document_are_warned_of(fault: str) -> None:
    """A step of one pack too, without PackingCheck, which the message names."""
    with pytest.warns(THDWarning, match=f"^The loss of WithLabels.training_step .*{fault}.*PackingCheck"):
        fit(True, module=WithLabels(WRONG_LABELS[fault]))


@pytest.mark.parametrize("loss", RIGHT_LABELS)
def test_other_labels_are_not(loss: str) -> None:
    fit(True, module=WithLabels(RIGHT_LABELS[loss]))


class OfPairs(Module):
    """Its step is that of a loop over pairs; ``reads`` looks at the batch before it fails elsewhere."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__(True)
        self.reads = reads

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.reads:
            x, y = [batch.input_ids]
        else:
            x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)


def test_a_step_of_pairs_is_told_what_to_write() -> None:
    message = r"OfPairs.training_step takes its batch apart.* x, which is \[T\], .* and batch.targets"
    with pytest.raises(ValueError, match=message):
        fit(True, module=OfPairs(reads=False))
    with pytest.raises(ValueError, match=r"^not enough values to unpack \(expected 2, got 1\)$"):
        fit(True, module=OfPairs(reads=True))


class MeanOfTokens(Module):
    """Its loss is the mean over a microbatch's own tokens."""

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch), batch.targets)


class ByHand(MeanOfTokens):
    """It decides itself what makes a step."""

    def __init__(self) -> None:
        super().__init__(True)
        self.automatic_optimization = False

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return loss


@pytest.mark.parametrize(
    "several",
    [
        {"accumulate_grad_batches": 2},
        {"strategy": "thd", "global_batch": Sequences(12)},
    ],
    ids=["accumulated", "sequences"],
)
def test_lightning_warns_of_a_loss_without_a_scale_where_microbatches_weigh(several: dict[str, Any]) -> None:
    with pytest.warns(THDWarning, match=r"MeanOfTokens.training_step read no scale .*batch.loss_scale"):
        fit(True, module=MeanOfTokens(True), **several)
    fit(True, **several)


def test_a_step_of_one_microbatch_and_a_step_by_hand_need_no_scale() -> None:
    fit(True, module=MeanOfTokens(True))
    fit(True, module=ByHand(), accumulate_grad_batches=1)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_lightning_refuses_evaluations(stage: str) -> None:
    run = getattr(quiet_trainer(), stage)
    with pytest.raises(UnreadBoundariesError, match=REFUSED):
        run(Module(False), datamodule=data())
    run(Module(True), datamodule=data())
    run(Module(False), datamodule=data(needs_boundaries=False))


@pytest.mark.parametrize("strategy", ["thd", "thd_ddp"])
def test_our_strategies_refuse_it_in_a_step_of_several_microbatches(strategy: str) -> None:
    with pytest.raises(UnreadBoundariesError, match=REFUSED):
        fit(False, strategy=strategy, global_batch=Sequences(12))
    fit(True, Monitor(peak=1e9), strategy=strategy, global_batch=Sequences(12))


def test_the_monitor_and_a_graph_do_not_ask_for_the_model() -> None:
    """Their own reads of boundaries are no use of them; graphs are captured from the module's own step."""
    for ported in (False, True):
        for callback in (Monitor(peak=1e9), CUDAGraphCallback(max_sequences=9, backend="recording")):
            if ported:
                fit(ported, callback, module=Module(ported, looks=False))
                continue
            with pytest.raises(UnreadBoundariesError, match=REFUSED):
                fit(ported, callback, module=Module(ported, looks=False))


def test_compiled_models_and_modules() -> None:
    for ported in (False, True):
        whole = torch.compile(Module(ported, looks=False), backend="eager")
        for module in (Module(ported, compiled=True), whole):
            if ported:
                fit(ported, module=module)
                continue
            with pytest.raises(UnreadBoundariesError, match=REFUSED):
                fit(ported, module=module)


@measured_anyway
@pytest.mark.parametrize("engine", LOOPS)
def test_loops_refuse_the_first_step_and_evaluations(engine: str) -> None:
    options: Any = {"data": data(global_batch=None), "loss_fn": loss_of}
    _, loop = make_loop(engine, None, model=Own(False).double(), **options)
    with pytest.raises(
        UnreadBoundariesError, match="needs_boundaries=False in prepare_fabric or prepare_thd"
    ):
        loop.backward(next(iter(loop.loader)))
    assert torch._C._len_torch_function_stack() == 0  # the counter of FLOPs has stopped
    with pytest.raises(UnreadBoundariesError, match=REFUSED):
        loop.evaluate(data())

    for off in ({"needs_boundaries": False}, {"data": data(needs_boundaries=False)}):
        _, loop = make_loop(engine, None, model=Own(False).double(), **{**options, **off})
        loop.backward(next(iter(loop.loader)))
        loop.evaluate(data())

    _, loop = make_loop(engine, None, model=Own(True).double(), **options)
    loop.backward(next(iter(loop.loader)))
    assert loop._train_loss is loop._loss_fn

    loop.evaluate(data())


class OwnTrainer(packed_trainer(Trainer)):  # type: ignore[misc]
    """A Trainer with a model and a loss of one's own."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return loss_of(model, inputs["batch"].to(self.args.device))


def own_trainer(folder: Path, ported: bool, **options: Any) -> Any:
    arguments = TrainingArguments(str(folder), max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
    rows = sequences(40)
    setup: Any = {
        "train_dataset": rows,
        "eval_dataset": rows,
        "capacity": CAPACITY,
        "peak": 1e9,
        **options,
    }
    return OwnTrainer(model=Own(ported), args=arguments, **setup)


@measured_anyway
def test_packed_trainer_refuses_the_first_step_and_evaluations(tmp_path: Path) -> None:
    trainer = own_trainer(tmp_path, False)
    for run in (trainer.train, lambda: trainer.evaluate(trainer.eval_dataset)):
        with pytest.raises(
            UnreadBoundariesError, match=r"OwnTrainer.compute_loss .*packed_trainer\(\.\.\.\)"
        ):
            run()
    for off in ({"needs_boundaries": False}, {"data_kwargs": {"needs_boundaries": False}}):
        own_trainer(tmp_path, False, **off).train()
    trainer = own_trainer(tmp_path, True)
    trainer.train()
    assert "compute_loss" not in vars(trainer)


def run_loop(ported: bool, *, steps: bool = True, stream: bool = False, **options: Any) -> nn.Module:
    """Train by hand, in plain torch; return the model."""
    model = Own(ported).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = sequences(40)
    source: Any = (lambda: iter(rows)) if stream else rows
    datamodule = THDDataModule(
        source, capacity=CAPACITY, global_batch=Sequences(12) if steps else None, **options
    )
    datamodule.attach(model=model)
    datamodule.setup("fit")
    monitor = Monitor(peak=1e9)
    monitor.watch(model, capacity=CAPACITY)

    for number, step in enumerate(datamodule.train_steps() if steps else datamodule.train_dataloader()):
        with monitor.step(step):
            batches = step.to("cpu").microbatches if steps else [step.to("cpu")]
            for batch in batches:
                (loss_of(model, batch) / len(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if number == 2:
            assert type(batches[0]) is THDBatch  # once a pack has passed, nothing is noted
            break

    return model


LOOPS_BY_HAND: list[dict[str, Any]] = [{}, {"steps": False}, {"steps": False, "stream": True}]


@measured_anyway
@pytest.mark.parametrize("loop", LOOPS_BY_HAND, ids=["steps", "packs", "stream"])
@pytest.mark.filterwarnings("ignore:The stream cannot save its position")
def test_a_loop_by_hand_is_refused_at_its_first_update(loop: dict[str, Any]) -> None:
    """The monitor's own reads are no use of the boundaries."""
    with pytest.raises(
        UnreadBoundariesError, match=r"Your loop over THDDataModule .*THDDataModule\(needs_boundaries"
    ):
        run_loop(False, **loop)
    run_loop(True, **loop)
    run_loop(False, needs_boundaries=False, **loop)


def test_the_weights_do_not_move_before_the_refusal() -> None:
    model = Own(False)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    datamodule = data()
    datamodule.setup("fit")

    def train() -> None:
        for number, batch in enumerate(datamodule.train_dataloader()):
            loss_of(model, batch).backward()
            if number == 1:  # gradients of two packs are added up
                optimizer.step()

    with pytest.raises(UnreadBoundariesError):
        train()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    other = nn.Linear(1, 1)
    other(torch.ones(1)).backward()
    torch.optim.SGD(other.parameters()).step()  # nothing is left behind


def test_an_optimizer_that_runs_a_closure_is_refused_in_its_first_step() -> None:
    model = Own(False)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    datamodule = data()
    datamodule.setup("fit")
    ran = []

    def train() -> None:
        for batch in datamodule.train_dataloader():

            def closure(batch: THDBatch = batch) -> torch.Tensor:
                ran.append(len(batch))
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)

    with pytest.raises(UnreadBoundariesError):
        train()
    assert len(ran) == 1


def test_loops_that_train_nothing_are_not_judged() -> None:
    """They look at batches, while something else may be trained before and after them."""
    datamodule = data()
    datamodule.setup("fit")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    for batch in datamodule.train_dataloader():
        assert batch.input_ids.numel()
        assert batch.targets.numel()
    first = next(iter(datamodule.train_dataloader()))
    assert first.input_ids.numel()
    model(torch.ones(1)).backward()
    optimizer.step()


def test_the_step_of_a_noted_microbatch_is_found() -> None:
    datamodule = data(global_batch=Sequences(30))
    datamodule.setup("fit")
    step = next(iter(datamodule.train_steps()))
    assert len(step) > 1
    moved = step.to("cpu")
    for place, batch in enumerate(moved.microbatches):
        own_step, number = batch.step
        assert number == place
        assert unnoted(own_step.microbatches[place]).input_ids is unnoted(batch).input_ids
    again = pickle.loads(pickle.dumps(step))
    assert [list(batch.lengths) for batch in again.microbatches] == [
        list(batch.lengths) for batch in step.microbatches
    ]
    assert step.stats == moved.stats


class Prepared(Module):
    """Trains a transformers model with "thd", and calls it a second time, on plain ids."""

    def __init__(self, call: Callable[[Any, THDBatch], Any]) -> None:
        super().__init__(True)
        self.call = call
        self.model = tiny_llama()

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.call(self.model, batch)
        return loss


CALLS: dict[str, tuple[Callable[[Any, THDBatch], Any], str]] = {
    "ids": (lambda model, batch: model(input_ids=batch.input_ids[None]), "and not where they begin"),
    "ids of its own device": (
        lambda model, batch: model(input_ids=batch.to("cpu").input_ids.clone()[None]),
        "and not where they begin",
    ),
    "ids and labels": (
        lambda model, batch: model(batch.input_ids[None], labels=batch.input_ids[None]),
        "and not where they begin",
    ),
    "targets": (
        lambda model, batch: model(**batch.hf_kwargs(), labels=batch.targets[None]),
        "are the next tokens already",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_prepared_model_refuses_the_ids_of_the_pack_by_themselves(call: str) -> None:
    """Also where the step asked for boundaries elsewhere."""
    run, words = CALLS[call]
    with pytest.raises(ValueError, match=words):
        fit(True, module=Prepared(run))


def test_a_prepared_model_runs_other_rows_in_a_step() -> None:
    fit(True, module=Prepared(lambda model, batch: model(input_ids=torch.arange(9)[None])))


@pytest.mark.parametrize("length", [2, 3, 5])
def test_targets_as_labels_are_refused_at_any_length(length: int) -> None:
    """Also of a single sequence, in a step, where no pack is known."""
    model: Any = tiny_llama()
    one = [{"input_ids": list(range(3, 3 + length))}]
    two = THDBatch.collate(one * 2)
    with pytest.raises(ValueError, match="are the next tokens already"):
        model(**two.hf_kwargs(), labels=two.targets[None])
    model(**two.hf_kwargs(), labels=two.input_ids[None])

    def step(batch: THDBatch) -> Any:
        return model(input_ids=batch.input_ids[None], labels=batch.targets[None])

    with pytest.raises(ValueError, match="are the next tokens already"):
        FirstStep(step, what="step", option="x")(THDBatch.collate(one))


def _on_ranks(ported: bool, cp: int) -> str:
    strategy: Any = THDDDPStrategy(context_parallel_size=cp) if cp > 1 else "ddp"
    try:
        fit(ported, strategy=strategy, devices=2, max_steps=2)
    except UnreadBoundariesError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("cp", [1, 2])
def test_every_rank_raises_and_none_waits(cp: int) -> None:
    """Under DDP, and where two ranks share every pack."""
    assert all(REFUSED in said for said in run_ranks(_on_ranks, 2, False, cp, timeout_s=60))
    assert run_ranks(_on_ranks, 2, True, cp, timeout_s=60) == ["", ""]


def test_the_numbers_are_those_of_training_without_the_check() -> None:
    """A noted first step changes no bit."""
    with_check = fit(True)
    without = fit(True, needs_boundaries=False)
    for one, other in zip(with_check.parameters(), without.parameters(), strict=True):
        assert torch.equal(one, other)
