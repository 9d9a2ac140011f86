"""Two checkouts -> where their losses and gradients differ, over every tiny family and every layout.

``python -m tests.models.compare OLD_CHECKOUT`` runs each family of ``families.py`` once with the package of
the old checkout and once with that of this one, in processes of their own, and compares losses, logits,
gradients and refusals bit for bit. ``--families`` and ``--layouts`` take parts of names, ``--new`` another
new checkout.

The families, samples and this file are this checkout's in both runs, so that only the package differs. It
uses public names of the package, except for the recording backend of graphs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
LENGTHS = (7, 1, 16, 3, 8)
RANKS = 2
# What one layout of one family gives: tensors by name, or the words of its refusal.
Outcome: TypeAlias = dict[str, Tensor] | str
# Context-parallel layouts of tokens, each with the communications that it knows.
SHARDS = (
    *product(("all_gather", "ulysses", "needed", "ring"), ("dual_chunk", "contiguous")),
    *product(("all_gather", "needed", "ring"), ("striped",)),
)


# ---- what is run, in a process that has one of the two packages


def samples(*, alike: int = 0) -> list[dict[str, Tensor]]:
    """Make the sequences; the first ``alike`` tokens of those that are longer are the same."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(3, 60, (alike,), generator=generator)
    made = []
    for length in LENGTHS:
        ids = torch.randint(3, 60, (length,), generator=generator)
        if length > alike:
            ids[:alike] = shared
        made.append({"input_ids": ids})
    return made


def model_of(family: str) -> nn.Module:
    """Build a family's model, with biases, norms and gates off their zeros and ones."""
    import lightning_thd.models  # noqa: F401 - registers "thd", which a bare import of the package does not
    from tests.models.families import build
    from tests.models.matrix import shake

    model = build(family, "thd").train()
    shake(model)
    return model


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the loss and each parameter's gradient."""
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def run_loss(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Train one pack; ``options`` are of collate."""
    from lightning_thd import THDBatch, causal_lm_loss

    alike = 3 if options.get("share_prefixes") else 0
    batch = THDBatch.collate(samples(alike=alike), **options)
    return gradients_of(model, causal_lm_loss(model, batch))


def run_padded(model: nn.Module) -> dict[str, Tensor]:
    """Train one pack whose sequences are padded, and whose end is too."""
    from lightning_thd.alignment import Alignment

    return run_loss(model, align=Alignment(sequence_multiple=4, total_multiple=16), pad_to=64)


def run_logits(model: nn.Module) -> dict[str, Tensor]:
    """Call the model itself, as a loop without this package's loss does."""
    from lightning_thd import THDBatch

    batch = THDBatch.collate(samples())
    logits = model(**batch.hf_kwargs()).logits
    loss = nn.functional.cross_entropy(logits[0].float(), batch.targets, reduction="sum")
    return {"logits": logits.detach(), **gradients_of(model, loss)}


def run_checkpointed(model: nn.Module, *, use_reentrant: bool) -> dict[str, Tensor]:
    """Train one pack whose layers are computed again in backward."""
    from tests.models.matrix import checkpoint

    checkpoint(model, use_reentrant=use_reentrant)
    if use_reentrant and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    return run_loss(model)


def run_static(model: nn.Module) -> dict[str, Tensor]:
    """Train one pack of static shapes, replayed by the backend that records operators."""
    from lightning_thd import THDBatch, causal_lm_loss
    from lightning_thd.cuda_graph import GraphedStep, make_buckets
    from lightning_thd.cuda_graph.recording import RecordingBackend

    buckets = make_buckets((8,), slots=48, max_seqlen=24)
    step = GraphedStep(causal_lm_loss, model, buckets=buckets, backend=RecordingBackend(), require=True)
    return gradients_of(model, step(THDBatch.collate(samples())))


def run_shard(family: str, ways: list[tuple[str, str]]) -> dict[str, Outcome]:
    """Train one pack on this rank's shards, once in each way."""
    import torch.distributed as dist

    from lightning_thd import THDBatch, causal_lm_loss
    from lightning_thd.alignment import Alignment
    from lightning_thd.parallel import shard_batch

    warnings.simplefilter("ignore")
    group = dist.group.WORLD

    def run(way: tuple[str, str]) -> dict[str, Tensor]:
        communication, layout = way
        model: Any = model_of(family)
        align = Alignment.for_(cp=RANKS, layout=layout)  # type: ignore[arg-type]
        batch = THDBatch.collate(samples(), align=align)
        shard = shard_batch(batch, group=group, layout=layout, communication=communication)  # type: ignore[arg-type]
        return gradients_of(model, causal_lm_loss(model, shard))

    return {name_of_shard(way): outcome_of(lambda way=way: run(way)) for way in ways}


def name_of_shard(way: tuple[str, str]) -> str:
    """Name a layout of shards."""
    return "shard " + " ".join(way)


ONE_PROCESS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "plain": run_loss,
    "logits": run_logits,
    "padding inside": run_padded,
    "checkpointed": lambda model: run_checkpointed(model, use_reentrant=False),
    "checkpointed reentrant": lambda model: run_checkpointed(model, use_reentrant=True),
    "shared prefixes": lambda model: run_loss(model, share_prefixes=True),
    "static shapes": run_static,
}


def outcome_of(run: Callable[[], dict[str, Tensor]]) -> Outcome:
    """Run a layout; a refusal is an outcome too, which is to stay the same."""
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run_family(family: str, wanted: Callable[[str], bool]) -> dict[str, Outcome]:
    """Run a family in each wanted layout."""
    from tests.ranks import RankError, run_ranks

    outcomes = {}
    for layout, run in ONE_PROCESS.items():
        if wanted(layout):
            outcomes[layout] = outcome_of(lambda run=run: run(model_of(family)))
    ways = [way for way in SHARDS if wanted(name_of_shard(way))]
    if ways:
        try:
            ranks = run_ranks(run_shard, RANKS, family, ways)
        except RankError as error:
            ranks = [dict.fromkeys(map(name_of_shard, ways), str(error))]
        for rank, of_rank in enumerate(ranks):
            outcomes.update({f"{layout}, rank {rank}": outcome for layout, outcome in of_rank.items()})
    return outcomes


def child(file: str, families: list[str], layouts: list[str]) -> None:
    """Run all that is wanted with the package that PYTHONPATH gives, and save the outcomes in a file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import lightning_thd
    from tests.models.families import FAMILIES

    print(f"The package is {Path(lightning_thd.__file__).resolve().parent}.", file=sys.stderr)
    outcomes = {}
    for family in FAMILIES:
        if chosen(family, families):
            outcomes[family] = run_family(family, lambda layout: chosen(layout, layouts))
    torch.save(outcomes, file)


def chosen(name: str, parts: list[str]) -> bool:
    """Return whether a name holds one of the parts, or whether there are none."""
    return not parts or any(part in name for part in parts)


# ---- the comparison


def run_with(checkout: Path, arguments: list[str]) -> dict[str, dict[str, Outcome]]:
    """Run this file with the package of a checkout and everything else of this one."""
    package = checkout.resolve() / "lightning_thd"
    if not package.is_dir():
        raise SystemExit(f"{checkout} has no folder lightning_thd. Pass the folder of a checkout.")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "lightning_thd").symlink_to(package)
        outcomes = Path(folder, "outcomes.pt")
        subprocess.run(
            [sys.executable, "-P", "-m", "tests.models.compare", "--child", str(outcomes), *arguments],
            env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"},
            check=True,
        )
        loaded: dict[str, dict[str, Outcome]] = torch.load(outcomes)
    return loaded


def differences(old: Outcome | None, new: Outcome | None) -> Iterator[str]:
    """Say how two outcomes of one layout differ; nothing if they are equal bit for bit."""
    if isinstance(old, str) or isinstance(new, str) or old is None or new is None:
        if old != new:
            yield f"was {_in_words(old)}, is {_in_words(new)}"
        return
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            yield f"{name} is only in the {'old' if name in old else 'new'}"
        elif old[name].shape != new[name].shape:
            yield f"{name} was {tuple(old[name].shape)}, is {tuple(new[name].shape)}"
        elif not torch.equal(old[name], new[name]):
            error = (old[name].double() - new[name].double()).abs().max()
            scale = old[name].double().abs().max().clamp_min(1e-300)
            yield f"{name} differs by {(error / scale).item():.1e} of its largest entry"


def _in_words(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not run"
    return f"refused ({outcome[:300]!r})" if isinstance(outcome, str) else "computed"


def compare(old: Path, new: Path, arguments: list[str]) -> int:
    """Print where two checkouts differ and return in how many cells."""
    before = run_with(old, arguments)
    after = run_with(new, arguments)
    cells = [(family, layout) for family in before for layout in before[family]]
    cells += [(f, layout) for f in after for layout in after[f] if (f, layout) not in set(cells)]
    unequal = 0
    computed = sum(not isinstance(before.get(f, {}).get(layout, ""), str) for f, layout in cells)

    for family, layout in cells:
        lines = list(differences(before.get(family, {}).get(layout), after.get(family, {}).get(layout)))
        unequal += bool(lines)
        # The loss and two gradients say where to look; a changed loss changes all gradients.
        for line in lines[:3]:
            print(f"{family}, {layout}: {line}")
        if len(lines) > 3:
            print(f"{family}, {layout}: ... and {len(lines) - 3} more")

    print(
        f"{len(cells)} cells of {len(before)} families, of which the old checkout computes {computed} and "
        f"refuses the rest: {unequal} differ."
    )
    return unequal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old", nargs="?", type=Path, help="the folder of the older checkout")
    parser.add_argument("--new", type=Path, default=ROOT, help="another checkout than this")
    parser.add_argument("--families", nargs="*", default=[], help="parts of names")
    parser.add_argument("--layouts", nargs="*", default=[], help="parts of names")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.families, args.layouts)
        return
    if args.old is None:
        parser.error("name the older checkout")
    arguments = ["--families", *args.families, "--layouts", *args.layouts]
    raise SystemExit(1 if compare(args.old, args.new, arguments) else 0)


if __name__ == "__main__":
    main()
