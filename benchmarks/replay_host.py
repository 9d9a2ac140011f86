"""The CPU time of a replayed step for 12 layers, without the graphs' own launches, on an imagined GPU.

``python -m benchmarks.replay_host`` captures a step of a Qwen3 of 12 tiny layers, replaces the replays of its
graphs by nothing, and measures what Python does around them: the fingerprint, the buffers' content, autograd
and the gradients. The imagined device costs more than a real one here: each copy runs on the CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import results

LAYERS = 12
LENGTHS = (20, 40, 4, 16, 16, 12, 10, 10)


def best_us(function: Callable[[], object], *, runs: int = 50, rounds: int = 9) -> float:
    """Return the CPU microseconds of a call, the least of several rounds, because others only add."""
    found = []
    for _ in range(rounds):
        begun = time.process_time()
        for _ in range(runs):
            function()
        found.append((time.process_time() - begun) / runs * 1e6)
    return min(found)


class _Nothing:
    def replay(self) -> None:
        """Launch nothing."""


def replayed(*, keep_gradients: bool) -> tuple[Any, Any, Any]:
    """Return a graphed step whose replays launch nothing, its model and a batch."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from lightning_thd import THDBatch, causal_lm_loss
    from lightning_thd.callbacks.cuda_graph import GraphedStep, make_buckets
    from lightning_thd.cuda_graph import graphed_step

    graphed_step._MARGIN = -1000.0  # an imagined replay is no faster
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "head_dim": 16}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=4, vocab_size=500)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="thd", dtype=torch.bfloat16)
    batch = THDBatch.collate([{"input_ids": torch.arange(length)} for length in LENGTHS]).to("cuda")
    buckets = make_buckets((16,), slots=sum(LENGTHS))
    step = GraphedStep(
        causal_lm_loss, model.train(), buckets=buckets, require=True, keep_gradients=keep_gradients
    )
    step(batch).backward()
    (captured,) = step._graphs.values()
    captured._pair.forward = captured._pair.backward = _Nothing()
    return step, model, batch


UPDATES = ("replayed", "eager")


def update_us(step: Any, model: Any, batch: Any, *, captured: bool) -> float:
    """Return the CPU microseconds of a fused AdamW's step, whose replay launches nothing."""
    from lightning_thd.cuda_graph.optimizer import GraphedOptimizer

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step(batch).backward()
    optimizer.step()
    if not captured:
        return best_us(optimizer.step)

    with GraphedOptimizer(optimizer, step) as graphs:
        optimizer.step()  # eager, which notes the parameters
        optimizer.step()  # captures
        (update,) = graphs._updates
        update.graph = _Nothing()
        return best_us(optimizer.step)


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    torch.set_num_threads(1)
    from tests.imagined.gpu import imagined_gpu

    with imagined_gpu():
        figures: dict[str, float] = {}
        for name, keep in (("buffers handed over", False), ("copies of gradients", True)):
            step, model, batch = replayed(keep_gradients=keep)

            parameters = [*model.parameters()]

            def one_step(step: Any = step, batch: Any = batch, parameters: Any = parameters) -> None:
                step(batch).backward()
                for parameter in parameters:
                    parameter.grad = None

            figures[name] = best_us(one_step)
            if not keep:
                updates = {way: update_us(step, model, batch, captured=way == "replayed") for way in UPDATES}
                print(
                    f"the update of a fused AdamW: {updates['replayed']:.0f} us, eager {updates['eager']:.0f}"
                )
            (captured,) = step._graphs.values()
            fingerprint_us = best_us(step._fingerprint.change)
            fill_us = best_us(partial(captured.inputs.fill, batch))
            print(
                f"{name}: {figures[name]:.0f} us of CPU a step, of which the fingerprint takes "
                f"{fingerprint_us:.0f} and the buffers' content {fill_us:.0f}"
            )
    results.less(
        f"host time of a replayed step, {LAYERS} layers, CPU, imagined GPU",
        figures["buffers handed over"] / 1e3,
        "ms",
        1.0,
        peer=figures["copies of gradients"] / 1e3,
    )
    results.less(
        f"host time of a replayed update, {LAYERS} layers, fused AdamW, CPU, imagined GPU",
        updates["replayed"] / 1e3,
        "ms",
        0.25 * updates["eager"] / 1e3,
        peer=updates["eager"] / 1e3,
    )


if __name__ == "__main__":
    main()
