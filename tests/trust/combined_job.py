"""One combination of model, layout and options -> its parameters against a loop by hand, or its refusal."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import re
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as L
import numpy as np
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule, causal_lm_loss
from tests.strategies.jobs import Layout, family_model, full_parameters, make_optimizer, make_trainer
from tests.tiny import sequences

STEPS = 2
COUNT = 40
CASE_S = 120.0
GRACE_S = 20.0
BOUND = 1e-9
BOUND_ROUTER = 1e-6
BOUND_FP32 = 1e-3
# Norms, states or routers that compute in fp32 whatever the model's dtype.
FP32_ROUTER = ("mixtral", "qwen3_moe")  # whose probabilities are fp32: 6e-8 where the last bit differs
FP32_INSIDE = ("bamba", "mamba2", "zamba2", "qwen3_next", "gpt_oss", "gemma2", "lfm2", "deepseek_v3")
_LLAMA_NORMS = ("llama", "mistral", "phi3", "qwen3", "mixtral", "qwen3_moe")
REFUSALS = (ValueError, TypeError, NotImplementedError, MisconfigurationException)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One combination, in plain values."""

    family: str
    layout: dict[str, Any]
    sequences: int | None
    packs: int | None
    capacity: int
    clip: float | None
    smoothing: float
    reduction: Any
    pad: bool
    checkpointing: bool
    frozen: bool
    labels: bool
    weights: bool
    seed: int

    @property
    def where(self) -> Layout:
        return Layout(
            **{k: v for k, v in self.layout.items() if k != "strategy"}, strategy=self.layout["strategy"]
        )

    @property
    def world(self) -> int:
        return self.where.world

    @property
    def step(self) -> Packs | Sequences:
        return Packs(self.packs) if self.packs is not None else Sequences(self.sequences or 0)

    def samples(self) -> list[dict[str, Any]]:
        """Make the same sequences in every process."""
        rows = sequences(COUNT, labels=self.labels, seed=self.seed)
        rng = np.random.default_rng(self.seed)
        for row in rows if self.weights else []:
            row["weights"] = rng.random(len(row["input_ids"])).astype(np.float32)
        return rows

    def model(self) -> nn.Module:
        """Build the same model in every process."""
        model = family_model(self.family)
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.frozen:
            model.get_input_embeddings().requires_grad_(False)
        return model


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank found: ``right``, ``wrong``, ``refused``, ``crashed``, ``ended`` by another's end."""

    kind: str
    text: str = ""
    error: float = 0.0

    @property
    def template(self) -> str:
        """The message without its numbers."""
        return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", self.text)[:300]


class CombinedModule(L.LightningModule):
    """Trains on a case's loss and remembers which sequences made each step."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.model = case.model()
        self.used: list[list[int]] = [[] for _ in range(STEPS)]

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.used[self.global_step].extend(batch.sequence_ids)
        return causal_lm_loss(
            self.model, batch, label_smoothing=self.case.smoothing, reduction=self.case.reduction
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model)


def run_cases(cases: list[Case], folder: str = "") -> list[Outcome]:
    """Run combinations one after the other on this rank."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in ("lightning.pytorch", "lightning.fabric", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with norms_in_their_dtype():
        if not folder:
            return [run_case(case) for case in cases]
        return [_timed_case(case, Path(folder), number) for number, case in enumerate(cases)]


def _timed_case(case: Case, folder: Path, number: int) -> Outcome:
    alarm = threading.Timer(CASE_S, os._exit, (4,))
    alarm.daemon = True
    alarm.start()
    outcome = run_case(case)
    rank = dist.get_rank()
    file = folder / f"{number}-{rank}.tmp"
    file.write_bytes(pickle.dumps(outcome))
    file.rename(folder / f"{number}-{rank}.found")
    if outcome.kind in ("refused", "crashed"):
        _wait_for_all(folder, number, case.world)
    alarm.cancel()
    return outcome


@contextmanager
def norms_in_their_dtype() -> Iterator[None]:
    """Make RMS norms compute in their input's dtype, fp64 here, and not in fp32 whatever it is.

    Sums in another order differ in fp64's last bit, and now and then that is one of fp32, 1e-8 of a weight.
    """

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        normal: Tensor = self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))
        return normal

    with ExitStack() as patches:
        for family in _LLAMA_NORMS:
            modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            norm = next(kind for name, kind in vars(modeling).items() if name.endswith("RMSNorm"))
            assert "variance_epsilon" in vars(norm(1))
            patches.enter_context(mock.patch.object(norm, "forward", forward))
        yield


def found_by(folder: Path, number: int) -> list[Outcome]:
    """Read what the ranks have found of a case, in rank order, without those that ended before."""
    return [pickle.loads(file.read_bytes()) for file in sorted(folder.glob(f"{number}-*.found"))]


def _wait_for_all(folder: Path, number: int, world: int) -> None:
    for _ in range(int(GRACE_S / 0.1)):
        if len(list(folder.glob(f"{number}-*.found"))) == world:
            return
        time.sleep(0.1)
    os._exit(5)


def run_case(case: Case) -> Outcome:
    """Train a combination on this rank and compare it with the loop by hand."""
    torch.manual_seed(0)
    try:
        trained, used = packed(case)
    except REFUSALS as err:
        last = traceback.extract_tb(err.__traceback__)[-1].filename
        kind = (
            "refused" if "lightning_thd" in last or isinstance(err, MisconfigurationException) else "crashed"
        )
        return Outcome(kind, f"{type(err).__name__}: {err}" if kind == "refused" else traceback.format_exc())
    except Exception:
        trace = traceback.format_exc()
        return Outcome("ended" if "Connection closed by peer" in trace else "crashed", trace)

    error = largest_error(trained, by_hand(case, used), part=case.where.pp > 1)
    bound = BOUND_ROUTER if case.family in FP32_ROUTER else BOUND
    bound = BOUND_FP32 if case.family in FP32_INSIDE else bound
    return Outcome("right" if error < bound else "wrong", f"error {error:.2e}", error)


def largest_error(found: dict[str, Tensor], wanted: dict[str, Tensor], *, part: bool) -> float:
    """Return the largest relative difference of a parameter, of a pipeline stage's own where it holds a part.

    What starts at zero and has no gradient but rounding, as the bias of keys, counts from 1e-3 an element.
    """
    assert found
    assert found.keys() <= wanted.keys() if part else found.keys() == wanted.keys()
    return max(
        float((found[n] - wanted[n]).norm() / wanted[n].norm().clamp_min(1e-3 * wanted[n].numel() ** 0.5))
        for n in found
    )


def packed(case: Case) -> tuple[dict[str, Tensor], list[list[int]]]:
    """Train the combination, and gather which sequences of the whole job made each step."""
    module = CombinedModule(case)
    where = case.where
    step = case.step
    accumulate = step.n // where.dp if isinstance(step, Packs) and where.pp == 1 else 1
    strategy = where.strategy if where.strategy in ("thd", "auto") else where.make(case.family)
    trainer = make_trainer(
        where,
        strategy=strategy,
        max_steps=STEPS,
        gradient_clip_val=case.clip,
        accumulate_grad_batches=accumulate,
    )
    data = THDDataModule(
        case.samples(), capacity=case.capacity, global_batch=step, pad_to=case.capacity if case.pad else None
    )
    trainer.fit(module, data)
    used = [module.used]

    if dist.is_initialized() and where.world > 1:
        used = [None] * where.world  # type: ignore[list-item]
        dist.all_gather_object(used, module.used)

    return full_parameters(module.model), [
        sorted({i for rank in used for i in rank[k]}) for k in range(STEPS)
    ]


def by_hand(case: Case, used: list[list[int]]) -> dict[str, Tensor]:
    """Train on the same steps with every sequence alone."""
    model = case.model()
    samples = case.samples()
    optimizer = make_optimizer(model)

    for ids in used:
        parts = [loss_of(model, samples[i], case) for i in ids]
        if case.reduction == "sequences":
            kept = [(total / count) for total, count in parts if float(count) > 0]
            loss = sum(kept, torch.zeros((), dtype=torch.float64)) / max(len(kept), 1)
        else:
            loss = sum(total for total, _ in parts) / max(sum(float(count) for _, count in parts), 1e-300)
        optimizer.zero_grad()
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()

    # The last stage of a pipeline has its own copy of a tied head, under the head's name.
    once = case.where.pp == 1
    return {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=once)}


def loss_of(model: nn.Module, sample: dict[str, Any], case: Case) -> tuple[Tensor, float]:
    """Sum the weighted loss of one sequence that is run alone, and its weights."""
    ids = torch.as_tensor(sample["input_ids"]).long()
    labels = torch.as_tensor(sample.get("labels", sample["input_ids"])).long()[1:]
    weights = torch.as_tensor(sample.get("weights", np.ones(len(ids)))).double()[1:]
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    losses = nn.functional.cross_entropy(
        logits, labels, reduction="none", ignore_index=-100, label_smoothing=case.smoothing
    )
    counted = torch.where(labels == -100, torch.zeros_like(weights), weights)
    return (losses * counted).sum(), float(counted.sum())
