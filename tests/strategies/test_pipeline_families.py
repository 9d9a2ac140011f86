"""Every causal family of transformers through two pipeline stages: the losses of one process, or refused."""

from __future__ import annotations

import json
import random
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import transformers
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from benchmarks import families
from lightning_thd import Packs, THDBatch, THDDataModule, THDModelParallelStrategy, causal_lm_loss
from tests.ranks import RankError, run_ranks
from tests.tiny import quiet_trainer

pytestmark = pytest.mark.slow
LENGTHS = (7, 1, 21, 9, 5, 12, 3, 18)
CHUNK = 8  # families on the same ranks
DRAWS = ("phimoe",)  # routes at random while it trains
Family = tuple[str, str]


class Tiny(L.LightningModule):
    """Two steps of SGD on a family's smallest model, in fp64."""

    def __init__(self, family: str, model_class: str) -> None:
        super().__init__()
        self.family = family
        self.model_class = model_class
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = families.build(self.family, self.model_class, "thd").double().train()
            if getattr(self.model, "_can_set_experts_implementation", bool)():
                self.model.set_experts_implementation("eager")  # grouped products know no fp64

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), 0.05)


def train(family: Family, stages: int) -> list[float]:
    """Return the losses of this rank: zeros but on the last stage."""
    rng = random.Random(0)
    module = Tiny(*family)
    rows = [{"input_ids": [rng.randrange(3, 60) for _ in range(length)]} for length in LENGTHS]
    trainer = quiet_trainer(
        strategy=THDModelParallelStrategy(pipeline_parallel_size=2) if stages > 1 else "thd",
        devices=stages,
        max_steps=2,
        accumulate_grad_batches=1 if stages > 1 else 2,
    )
    trainer.fit(module, THDDataModule(rows, capacity=48, global_batch=Packs(2)))
    return module.losses


def train_all(chunk: list[Family], stages: int, failed: str) -> list[list[float]]:
    """Train families one after the other; the first failure is written down and ends the ranks."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    losses = []
    for family in chunk:
        try:
            losses.append(train(family, stages))
        except Exception as err:
            is_ours = "lightning_thd" in traceback.extract_tb(err.__traceback__)[-1].filename
            said = is_ours and isinstance(err, ValueError | MisconfigurationException)
            text = str(err) if said else traceback.format_exc()[-800:]
            with suppress(FileExistsError), open(failed, "x") as file:  # the first: the others lose a peer
                file.write(json.dumps([family[0], "refused" if said else "crash", text]))
            raise
    return losses


def verdicts(chunk: list[Family], folder: Path) -> dict[str, tuple[str, str]]:
    """Return of each family whether it is exact, wrong, refused or crashed, and why."""
    if not chunk:
        return {}
    failed = folder / "failed.json"

    try:
        _, last = run_ranks(train_all, 2, chunk, 2, str(failed), timeout_s=30.0 + 20 * len(chunk))
    except RankError as err:
        if not failed.exists():
            pytest.fail(f"ranks hang in one of {chunk}: {err}")
        name, verdict, why = json.loads(failed.read_text())
        failed.unlink()
        rest = [family for family in chunk if family[0] != name]
        return {name: (verdict, why), **verdicts(rest, folder)}

    (alone,) = run_ranks(train_all, 1, chunk, 1, str(failed), timeout_s=30.0 + 20 * len(chunk))
    return {
        name: ("exact" if actual == pytest.approx(expected, rel=1e-5) else "wrong", f"{actual} {expected}")
        for (name, _), actual, expected in zip(chunk, last, alone, strict=True)
    }


def test_every_family_that_packs_exactly_is_exact_through_stages_or_refused(tmp_path: Path) -> None:
    table = (Path(families.__file__).parent / "FAMILIES.md").read_text()
    packs = table.split("## causal\n\nExact: ")[1].split(".\n")[0].split(", ")
    configs = families.families("causal")
    chosen = [(name, configs[name]) for name in packs if name in configs and name not in DRAWS]
    outcomes: dict[str, tuple[str, str]] = {}
    for start in range(0, len(chosen), CHUNK):
        outcomes |= verdicts(chosen[start : start + CHUNK], tmp_path)
    bad = {name: why for name, why in outcomes.items() if why[0] not in ("exact", "refused")}
    assert not bad
    assert sum(verdict == "exact" for verdict, _ in outcomes.values()) >= 110, outcomes
