"""An Accelerate loop on packs. Run it with python examples/accelerate_loop.py, accelerate launch or torchrun.

It uses the data and the model of the quickstart. With Sequences(16), every step has exactly 16 documents, on
any number of processes. MFU and tokens/s go to TensorBoard through accelerator.log.

For torchrun on CPUs, set ACCELERATE_USE_CPU=true. Without it, every process trains a model of its own.
"""

import argparse

import torch
from accelerate import Accelerator
from quickstart import make_model

from lightning_thd import Sequences, THDDataModule, prepare_thd
from lightning_thd.data import StdlibText
from lightning_thd.precision import fastest_precision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=100, help="100 take three to five minutes on two CPU cores"
    )
    parser.add_argument("--out", default="runs/accelerate")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    mixed = {"bf16-mixed": "bf16", "16-mixed": "fp16", "32-true": "no"}[fastest_precision()]
    accelerator = Accelerator(mixed_precision=mixed, log_with="tensorboard", project_dir=args.out)
    accelerator.init_trackers("thd")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    data = THDDataModule(StdlibText(max_bytes=2048), capacity=8_192, global_batch=Sequences(16))
    loop = prepare_thd(accelerator, model, data, optimizer, peak="measure", log_every_n_steps=5)
    if args.resume:
        accelerator.load_state(f"{args.out}/state")

    while loop.global_step < args.steps:
        for step in loop.loader:
            loss = loop.backward(step)
            accelerator.clip_grad_norm_(loop.model.parameters(), 1.0)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            if loop.global_step % 5 == 0:
                mean = accelerator.reduce(loss, "mean").item()
                accelerator.log({"train/loss": mean}, step=loop.global_step)
                accelerator.print(f"step {loop.global_step}: loss {mean:.3f}")
            if loop.global_step == args.steps:
                break
    accelerator.save_state(f"{args.out}/state")
    accelerator.end_training()


if __name__ == "__main__":
    main()
