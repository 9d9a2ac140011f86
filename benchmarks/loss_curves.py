"""The same 100 steps in fp32 and in bf16: losses of the quickstart's model beside each other.

``python -m benchmarks.loss_curves`` trains from the same weights on the same packs of 2,048 tokens, once in
fp32 and once under bf16 autocast, by the quickstart's optimizer, and prints every tenth loss. Goal: at most
1 % apart at step 100, where a loss is the mean of the ten steps before it. The peer is torch's own bf16:
transformers' loss and attention on the same documents, flattened.
"""

from __future__ import annotations

import argparse
from itertools import islice

import torch

from benchmarks.end_to_end import Step, flattened, make_model, ours
from benchmarks.results import less
from lightning_thd import THDBatch, THDDataModule
from lightning_thd.data import StdlibText

CAPACITY, STEPS, MEAN = 2_048, 100, 10


def packs(count: int) -> list[THDBatch]:
    data = THDDataModule(StdlibText(max_bytes=2048), capacity=CAPACITY, oversize="split")
    data.setup("fit")
    return [batch for batch in islice(data.train_dataloader(), count) if isinstance(batch, THDBatch)]


def curve(attention: str, steps: list[Step], dtype: torch.dtype) -> list[float]:
    model = make_model(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in steps:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = step(model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main(argv: list[str] | None = None) -> None:
    """Print both curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args(argv)
    batches = packs(args.steps)
    exact = curve("thd", ours(batches), torch.float32)
    narrow = curve("thd", ours(batches), torch.bfloat16)
    peer = curve("sdpa", flattened(batches), torch.bfloat16)
    print(f"{'step':>6}{'fp32':>10}{'bf16':>10}{'apart':>9}{'torch bf16':>12}{'apart':>9}")
    apart = 0.0, 0.0
    for step in range(MEAN, args.steps + 1, MEAN):
        wanted, *means = (sum(x[step - MEAN : step]) / MEAN for x in (exact, narrow, peer))
        apart = abs(means[0] / wanted - 1), abs(means[1] / wanted - 1)
        print(f"{step:6}{wanted:10.4f}{means[0]:10.4f}{apart[0]:9.2%}{means[1]:12.4f}{apart[1]:9.2%}")
    what = f"loss of bf16 from fp32's at step {args.steps}, torch's own bf16"
    less(what, 100 * apart[0], "%", 1.0, peer=100 * apart[1], precision="bf16")


if __name__ == "__main__":
    main()
