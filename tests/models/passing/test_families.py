"""Models whose recurrent layers pass states from rank to rank give the gradients of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.alignment import Alignment
from lightning_thd.models.passing import adopt
from lightning_thd.parallel.shard import shard_batch
from tests.models.families import FAMILIES
from tests.ranks import run_ranks

# Documents of several shards, of parts of one, of one token, shorter than the convolution.
LENGTHS = (3, 100, 1, 2, 31, 1, 6)
SHARP = ["lfm2", "bamba", "qwen3_next"]
OTHERS = ["mamba2", "falcon_h1", "zamba2", "granitemoehybrid", "nemotron_h", "qwen3_5", "olmo_hybrid"]
MORE = ["kimi_linear", "lfm2_moe", "lfm3", "bailing_hybrid"]


def build(family: str) -> nn.Module:
    chosen = FAMILIES[family]
    config = getattr(transformers, chosen.config)(**chosen.arguments)
    torch.manual_seed(0)
    options = {"attn_implementation": "thd", "experts_implementation": "eager"}  # grouped_mm knows no fp64
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **options)
    return model.double().train()


def gradients(model: nn.Module, batch: THDBatch) -> tuple[float, dict[str, Tensor]]:
    loss = causal_lm_loss(model, batch)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare(families: list[str], layout: str) -> dict[str, tuple[float, float, int]]:
    """Return the errors of loss and gradients of every family, and how many layers passed states."""
    warnings.filterwarnings("ignore")
    group: Any = dist.group.WORLD
    cp = group.size()
    rows = [{"input_ids": torch.arange(n) * 7 % 60 + 1} for n in LENGTHS]
    batch = THDBatch.collate(rows, align=Alignment.for_(cp=cp, layout=layout))  # type: ignore[arg-type]
    errors = {}
    for family in families:
        loss, wanted = gradients(build(family), THDBatch.collate(rows))
        passed = []
        with pytest.MonkeyPatch.context() as patch:
            original = adopt.run_on_shard
            patch.setattr(
                "lightning_thd.models.mixers.run_on_shard",
                lambda *args, original=original, passed=passed: passed.append(1) or original(*args),
            )
            own, found = gradients(build(family), shard_batch(batch, group=group, layout=layout))  # type: ignore[arg-type]
        for name in wanted:
            grad = found.get(name)
            found[name] = torch.zeros_like(wanted[name]) if grad is None else grad
            dist.all_reduce(found[name])
            found[name] /= cp
        scale = max(float(grad.norm()) for grad in wanted.values())
        worst = max(
            float((found[n] - grad).norm() / max(float(grad.norm()), 1e-3 * scale))
            for n, grad in wanted.items()
        )
        errors[family] = (abs(own - loss) / loss, worst, len(passed))
    return errors


if __name__ == "__main__":
    import sys
    for layout in sys.argv[2].split(","):
        for family in sys.argv[3:]:
            try:
                print(layout, family, run_ranks(compare, int(sys.argv[1]), [family], layout)[0], flush=True)
            except BaseException as e:
                print(layout, family, "FAILED", str(e)[-1500:], flush=True)
