"""Losses, or families, on an imagined GPU against the CPU; a script."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_thd.models import register_thd
from tests.imagined.gpu import data, imagined_gpu
from tests.loss.cases import cases, run
from tests.models import matrix
from tests.models.families import build

# AdamW is not here: a gradient is compared as it comes. fp32 sums in other orders.
RELATIVE, ABSOLUTE = 2e-4, 1e-6


def compare(log: Any, make: Callable[[], Any], loss: Callable[[Any, Any], Tensor], given: Any) -> str:
    """Compare a loss with the CPU's; return what its second call reads, and uploads without pinned memory."""
    here = make()
    there = make().cuda()
    wanted, gradients = run(here, loss, given)
    run(there, loss, given.to("cuda"))
    moved = given.to("cuda")
    log.clear()
    value, found = run(there, loss, moved)
    seen = [" ".join(map(str, read)) for read in log.reads]
    seen += [f"{name} {place}" for name, _, pinned, free, place in log.uploads if not (pinned and free)]
    torch.testing.assert_close(data(value), wanted, rtol=RELATIVE, atol=ABSOLUTE)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        near = {"rtol": RELATIVE, "atol": ABSOLUTE + RELATIVE * float(gradient.abs().max())}
        torch.testing.assert_close(
            data(found[name]), gradient, **near, msg=lambda said, n=name: f"{n}: {said}"
        )
    return ", ".join(seen)


def compare_family(log: Any, name: str) -> str:
    """Compare logits, loss and gradients of a family with the oracle of ``tests/models``."""
    state, wanted = matrix.oracle(name)
    model = build(name, "thd")
    model.load_state_dict(state)
    model = model.eval().to("cuda")
    logits = []
    targets = []
    for batch in (pack.to("cuda") for pack in matrix.packs()):
        logits += batch.unpack(model(**batch.hf_kwargs()).logits.float())
        targets += batch.unpack(batch.targets)
    found = matrix.result_of(model, logits, targets)
    gradients = {key: data(value) for key, value in found.gradients.items()}
    here = matrix.Result([data(x) for x in found.logits], data(found.loss), gradients)
    matrix.assert_same(here, wanted, tolerance=1e-5)
    return ""


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    register_thd()
    wrong = []
    capability = tuple(int(part) for part in sys.argv[1].split("."))
    families = [(name, compare_family, (name,)) for name in sys.argv[2:]]
    for name, function, given in families or [(name, compare, rest) for name, *rest in cases()]:
        with imagined_gpu(capability=capability) as log:
            try:
                said = function(log, *given)
            except Exception as error:  # the others still run
                said = f"{type(error).__name__} {str(error)[:400]}"
        wrong += [name] if said else []
        sys.stdout.write(f"{name}: {said or 'equal'}\n")
        sys.stdout.flush()
    sys.exit(f"different, or they read or wait: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
