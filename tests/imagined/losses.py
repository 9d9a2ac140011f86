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
RELATIVE = 2e-4
ABSOLUTE = 1e-6


def compare(log: Any, make: Callable[[], Any], loss: Callable[[Any, Any], Tensor], batch: Any) -> str:
    """Compare a loss with the CPU's; return what its second call reads, and uploads without pinned memory."""
    on_cpu = make()
    on_gpu = make().cuda()
    expected, expected_gradients = run(on_cpu, loss, batch)
    run(on_gpu, loss, batch.to("cuda"))
    moved = batch.to("cuda")
    log.clear()
    value, gradients = run(on_gpu, loss, moved)
    waits = [" ".join(map(str, read)) for read in log.reads]
    waits += [f"{name} {place}" for name, _, pinned, free, place in log.uploads if not (pinned and free)]

    torch.testing.assert_close(data(value), expected, rtol=RELATIVE, atol=ABSOLUTE)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(
            data(gradients[name]),
            gradient,
            rtol=RELATIVE,
            atol=ABSOLUTE + RELATIVE * float(gradient.abs().max()),
            msg=lambda message, name=name: f"{name}: {message}",
        )
    return ", ".join(waits)


def compare_family(log: Any, name: str) -> str:
    """Compare logits, loss and gradients of a family with the oracle of ``tests/models``."""
    state, expected = matrix.oracle(name)
    model = build(name, "thd")
    model.load_state_dict(state)
    model = model.eval().to("cuda")
    logits = []
    targets = []
    for batch in (pack.to("cuda") for pack in matrix.packs()):
        logits += batch.unpack(model(**batch.hf_kwargs()).logits.float())
        targets += batch.unpack(batch.targets)
    result = matrix.result_of(model, logits, targets)
    gradients = {key: data(value) for key, value in result.gradients.items()}
    on_cpu = matrix.Result([data(x) for x in result.logits], data(result.loss), gradients)
    matrix.assert_same(on_cpu, expected, tolerance=1e-5)
    return ""


def main() -> None:
    """Compare families that are named on the command line, or all losses; exit with those that differ."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    register_thd()
    capability = tuple(int(part) for part in sys.argv[1].split("."))
    comparisons: list[tuple[str, Callable[..., str], Any]] = [
        (name, compare_family, (name,)) for name in sys.argv[2:]
    ]
    if not comparisons:
        comparisons = [(name, compare, rest) for name, *rest in cases()]

    wrong = []
    for name, function, arguments in comparisons:
        with imagined_gpu(capability=capability) as log:
            try:
                problem = function(log, *arguments)
            except Exception as error:  # the others still run
                problem = f"{type(error).__name__} {str(error)[:400]}"
        if problem:
            wrong.append(name)
        sys.stdout.write(f"{name}: {problem or 'equal'}\n")
        sys.stdout.flush()
    sys.exit(f"different, or they read or wait: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
