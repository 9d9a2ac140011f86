"""Updates of torch's optimizers, replayed from graphs on an imagined GPU, equal eager ones bit for bit.

Each case trains three times: with graphs of the step and of the update, with graphs of the step only, and
eagerly. The first two must be equal. The third has no padding, so its sums may be rounded differently.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd.callbacks.cuda_graph import CUDAGraphCallback
from tests.cuda_graph.support import worst
from tests.cuda_graph.test_optimizer import RATE, Module, fit
from tests.imagined import compiled
from tests.imagined.gpu import data, imagined_gpu

STEPS = 6
# Adam's eps, and that of its kin, so that rounding of tiny gradients is not amplified.
EPS = {"eps": 1e-3}
EAGER = 2e-2  # in fp16, and in fp32 over padded rows


class Untimed(compiled.Untimed):
    """Has no times, and says that the imagined GPU runs what it captures, as a real one does not."""

    runs_captures = True


@dataclass(frozen=True, kw_only=True)
class Case:
    """An optimizer and how a Trainer runs it."""

    make: Callable[[Any], torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)


def torchs(name: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes one of torch's optimizers, chosen by its name."""
    kind = getattr(torch.optim, name)
    return lambda parameters: kind(parameters, lr=RATE, **options)


def capturable(name: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes one of torch's optimizers, which counts its steps on the device."""
    return torchs(name, capturable=True, **options)


FP16 = {"precision": "16-mixed"}
SUMS = {"accumulate_grad_batches": 2}
CASES: dict[str, Case] = {
    "AdamW, fused": Case(make=torchs("AdamW", fused=True, **EPS)),
    "AdamW, capturable": Case(make=capturable("AdamW", **EPS)),
    "AdamW, one by one": Case(make=capturable("AdamW", foreach=False, **EPS)),
    "SGD, fused, sums": Case(make=torchs("SGD", fused=True, momentum=0.9), options=SUMS),
    "Adam, amsgrad": Case(make=capturable("Adam", amsgrad=True, **EPS)),
    "NAdam": Case(make=capturable("NAdam", **EPS)),
    "RAdam": Case(make=capturable("RAdam", **EPS)),
    "Adamax": Case(make=capturable("Adamax", **EPS)),
    "Adadelta": Case(make=capturable("Adadelta", **EPS)),
    "RMSprop": Case(make=capturable("RMSprop", **EPS)),
    "ASGD": Case(make=capturable("ASGD")),
    "fp16": Case(make=capturable("AdamW", **EPS), options=FP16),
    "fp16, without clipping": Case(
        make=capturable("AdamW", **EPS), options={**FP16, "gradient_clip_val": None}
    ),
    "fp16, sums": Case(make=capturable("AdamW", **EPS), options={**FP16, **SUMS}),
    # Lightning refuses to clip gradients of a fused optimizer in mixed precision.
    "bf16, fused": Case(
        make=torchs("AdamW", fused=True, **EPS),
        options={"precision": "bf16-mixed", "gradient_clip_val": None},
    ),
    "bf16": Case(make=capturable("AdamW", **EPS), options={"precision": "bf16-mixed"}),
}


def train(case: Case, callback: CUDAGraphCallback | None) -> list[torch.Tensor]:
    """Train a module; return its parameters and the optimizer's states."""
    callbacks = [] if callback is None else [callback]
    module, trainer = fit(
        *callbacks, module=Module(case.make), accelerator="gpu", devices=1, max_steps=STEPS, **case.options
    )
    (optimizer,) = trainer.optimizers
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return [data(x.detach()).clone() for x in (*module.parameters(), *states)]


def graphs(*, capture_optimizer: bool) -> CUDAGraphCallback:
    """Return a callback that replays whatever fits, however long it takes here."""
    return CUDAGraphCallback(
        backend=Untimed(), max_sequences=(6, 9), require=True, capture_optimizer=capture_optimizer
    )


def check(name: str) -> None:
    """Train a case in three ways, and compare."""
    case = CASES[name]
    callback = graphs(capture_optimizer=True)
    ours = train(case, callback)
    plain = train(case, graphs(capture_optimizer=False))
    eager = train(case, None)

    assert len(ours) == len(plain) == len(eager) > 20, name
    differing = [i for i, (a, b) in enumerate(zip(ours, plain, strict=True)) if not torch.equal(a, b)]
    assert not differing, (name, differing)
    stats = callback.stats
    assert stats.optimizer_replays > 0, (name, stats)
    error = worst(ours, eager)
    assert error < EAGER, (name, error)
    replayed = f"{stats.optimizer_replays} updates replayed, others {dict(stats.optimizer_fallbacks)}"
    sys.stdout.write(f"{name}: {replayed}, bit for bit the eager ones; {error:.1e} from eager training\n")


def check_refusal() -> None:
    """A fused optimizer, which a GradScaler gives new tensors in every step, is refused."""
    fused = Case(make=torchs("AdamW", fused=True), options={**FP16, "gradient_clip_val": None})
    expected = "'16-mixed' gives a fused optimizer another scale.*Pass capturable=True, fused=False"
    with pytest.raises(MisconfigurationException, match=expected):
        train(fused, graphs(capture_optimizer=True))
    sys.stdout.write("fp16, fused: refused\n")


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    with imagined_gpu(capability=(9, 0)):
        for name in names or CASES:
            check(name)
        check_refusal()


if __name__ == "__main__":
    main(sys.argv[1:])
