"""A Fabric loop on packs: python examples/fabric_loop.py [--devices 2]."""

import argparse

import lightning as L
import torch
from lightning.fabric.loggers import CSVLogger
from quickstart import make_model

from lightning_thd import Sequences, THDDataModule
from lightning_thd.data import StdlibText
from lightning_thd.integrations import prepare_fabric
from lightning_thd.precision import fastest_precision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=100, help="100 take three to five minutes on two CPU cores"
    )
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--out", default="runs/fabric")
    args = parser.parse_args()

    fabric = L.Fabric(
        accelerator="auto",
        devices=args.devices,
        precision=fastest_precision(),  # bf16-mixed on a GPU that has it
        strategy="ddp" if args.devices > 1 else "auto",
        loggers=CSVLogger(args.out),
    )
    fabric.launch()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    data = THDDataModule(StdlibText(max_bytes=2048), capacity=8_192, global_batch=Sequences(16))
    loop = prepare_fabric(fabric, model, data, optimizer, peak="measure", log_every_n_steps=5)

    while loop.global_step < args.steps:
        for step in loop.loader:
            loss = loop.backward(step)
            fabric.clip_gradients(loop.model, loop.optimizer, max_norm=1.0, error_if_nonfinite=False)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            if loop.global_step % 5 == 0:  # item() waits for the device
                fabric.print(f"step {loop.global_step}: loss {fabric.all_reduce(loss).item():.3f}")
            if loop.global_step == args.steps:
                break
    state = {"model": loop.model, "optimizer": loop.optimizer, "loader": loop.loader, "loop": loop}
    fabric.save(f"{args.out}/state.ckpt", state)


if __name__ == "__main__":
    main()
