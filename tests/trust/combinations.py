"""Random models x layouts x options -> a right answer against one process, or a refusal that says why.

``python -m tests.trust.combinations 2000`` trains two steps of each combination of tiny size, and compares
the parameters with the same steps by hand: one process, every sequence alone, no pack. It writes its table
into ``benchmarks/TRUST.md``.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ranks import RankError, run_ranks
from tests.trust.combined_job import CASE_S, Case, Outcome, found_by, run_cases
from tests.trust.record import record

CHUNK = 24  # cases on one start of the ranks

FAMILIES = (
    *("llama", "qwen3", "mistral", "gemma2", "phi3", "olmo2", "gpt2", "stablelm", "opt", "gpt_neox"),
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba2", "bamba", "qwen3_next", "lfm2", "zamba2"),
)
ONE = ({"strategy": "thd"}, {"strategy": "auto"})
TWO: tuple[dict[str, Any], ...] = (
    {"strategy": "thd_ddp", "dp": 2},
    {"strategy": "thd_ddp", "cp": 2},
    {"strategy": "thd_model_parallel", "dp": 2},
    {"strategy": "thd_model_parallel", "cp": 2},
    {"strategy": "thd_model_parallel", "tp": 2},
    {"strategy": "thd_model_parallel", "pp": 2},
)
FOUR: tuple[dict[str, Any], ...] = (
    {"strategy": "thd_ddp", "dp": 2, "cp": 2},
    {"strategy": "thd_model_parallel", "dp": 2, "cp": 2},
    {"strategy": "thd_model_parallel", "cp": 2, "tp": 2},
    {"strategy": "thd_model_parallel", "dp": 2, "tp": 2},
    {"strategy": "thd_model_parallel", "pp": 2, "dp": 2},
)
CUTS = ("dual_chunk", "contiguous", "striped")
COMMUNICATIONS = ("auto", "all_gather", "ulysses", "needed", "ring")


def draw(rng: random.Random) -> Case:
    """Draw one combination."""
    where = dict(rng.choice(rng.choice([ONE, ONE, TWO, FOUR])))
    options: dict[str, Any] = {}

    if where.get("cp", 1) > 1:
        options["context_parallel_layout"] = rng.choice(CUTS)
        options["context_parallel_communication"] = rng.choice(COMMUNICATIONS)

    if where.get("tp", 1) > 1 and rng.random() < 0.3:
        options["sequence_parallel"] = True
    dp = where.get("dp", 1)
    packs = rng.random() < 0.4
    return Case(
        family=rng.choice(FAMILIES),
        layout={**where, "options": options},
        sequences=None if packs else rng.choice([4, 6, 9, 12]),
        packs=dp * rng.choice([1, 2]) if packs else None,
        capacity=rng.choice([48, 64, 100]),
        clip=rng.choice([None, 0.5, 0.01]),
        smoothing=rng.choice([0.0, 0.0, 0.1]),
        reduction=rng.choice(["tokens", "tokens", "sequences"]),
        pad=rng.random() < 0.25,
        checkpointing=rng.random() < 0.2,
        frozen=rng.random() < 0.2,
        labels=rng.random() < 0.6,
        weights=rng.random() < 0.2,
        seed=rng.randrange(3),
    )


@dataclass(slots=True)
class Tally:
    """What the combinations have come to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    worst: float = 0.0

    def add(self, case: Case, found: list[Outcome]) -> None:
        """Count one combination by what all its ranks found."""
        kinds = {outcome.kind for outcome in found}
        if kinds == {"refused", "ended"} and case.where.pp > 1:
            self.add_ended(case, [outcome for outcome in found if outcome.kind == "refused"], "")
            return
        kind = kinds.pop() if len(kinds) == 1 else "ranks differ"
        self.outcomes[kind] += 1
        if kind == "refused":
            self.refusals[found[0].template] += 1
        elif kind == "right":
            self.worst = max(self.worst, *(outcome.error for outcome in found))
        else:
            self._say(f"{case}: {[outcome.text[-1500:] for outcome in found]}")

    def add_ended(self, case: Case, found: list[Outcome], died: str) -> None:
        """Count one that ended its ranks: a stage of a pipeline may refuse what the others cannot see."""
        if found and case.where.pp > 1 and all(outcome.kind == "refused" for outcome in found):
            self.outcomes["refused by one stage"] += 1
            self.refusals[found[0].template] += 1
            return
        self.outcomes["died or hung"] += 1
        self._say(f"{case}: {died} {[outcome.text[-1500:] for outcome in found]}")

    def _say(self, fault: str) -> None:
        self.wrong.append(fault)
        sys.stderr.write(f"{fault}\n")


def run(count: int, seed: int, minutes: float) -> Tally:
    """Run combinations until there are enough of them or the time is over."""
    rng = random.Random(seed)
    tally = Tally()
    ends = time.monotonic() + 60 * minutes
    waiting: dict[int, list[Case]] = {}
    drawn = 0

    while drawn < count and time.monotonic() < ends:
        case = draw(rng)
        drawn += 1
        group = waiting.setdefault(case.world, [])
        group.append(case)
        if len(group) == CHUNK:
            _together(waiting.pop(case.world), tally)
            sys.stderr.write(f"{dict(tally.outcomes)}\n")

    for group in waiting.values():
        _together(group, tally)
    return tally


def _together(cases: list[Case], tally: Tally) -> None:
    """Run combinations of one world size on the same ranks; after one that ends them, on new ones."""
    while cases:
        died = ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_ranks(run_cases, cases[0].world, cases, folder, timeout_s=CASE_S * len(cases))
            except RankError as err:
                died = str(err)
            by_case = [found_by(Path(folder), number) for number in range(len(cases))]

        whole = next((i for i, case in enumerate(cases) if len(by_case[i]) < case.world), len(cases))
        for case, outcomes in zip(cases[:whole], by_case, strict=False):
            tally.add(case, outcomes)

        # a rank that found the others gone says nothing of its case: again on new ranks, but only once
        again = whole < len(cases) and whole > 0 and all(x.kind == "ended" for x in by_case[whole])
        if whole < len(cases) and not again:
            tally.add_ended(cases[whole], [x for x in by_case[whole] if x.kind != "ended"], died)
        cases = cases[whole + (not again) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()

    started = time.monotonic()
    tally = run(options.count, options.seed, options.minutes)

    exact = tally.outcomes["right"]
    stage = tally.outcomes["refused by one stage"]
    right = exact + tally.outcomes["refused"] + stage

    record(
        "combinations",
        {
            "combinations of model, layout and options": tally.outcomes.total(),
            "equal to one process, sequences alone (1e-9; fp32 routers 1e-6, more in fp32 1e-3)": exact,
            "refused with a message": f"{tally.outcomes['refused']} ({len(tally.refusals)} messages)",
            "refused by one stage of a pipeline, whose end is that of the others": stage,
            "wrong, ranks differ, died or hung": tally.outcomes.total() - right,
            "largest relative error of a parameter": f"{tally.worst:.1e}",
            "minutes": f"{(time.monotonic() - started) / 60:.1f}",
        },
    )
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
