"""A student model learns a teacher's predictions on packs, and neither model computes logits.

python examples/distillation.py
"""

import argparse

import torch
from quickstart import make_model

from lightning_thd import THDBatch
from lightning_thd.loss import fused_linear_distillation
from lightning_thd.precision import fastest_precision


def make_batch() -> THDBatch:
    samples = [{"input_ids": torch.randint(0, 256, (length,))} for length in (60, 25, 41, 9)]
    return THDBatch.collate(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bf16 = torch.autocast(device, torch.bfloat16, enabled=fastest_precision() == "bf16-mixed")
    teacher, student = make_model().requires_grad_(False).to(device), make_model().to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for step in range(arguments.steps):
        batch = make_batch().to(device)
        with torch.no_grad(), bf16:
            teacher_hidden = teacher.model(**batch.hf_kwargs()).last_hidden_state[0]
        with bf16:
            hidden = student.model(**batch.hf_kwargs()).last_hidden_state[0]
            loss = fused_linear_distillation(
                hidden,
                student.lm_head.weight,
                batch.targets,
                teacher_hidden=teacher_hidden,
                teacher_weight=teacher.lm_head.weight,
                kind="jsd",
                temperature=2.0,
                alpha=0.8,
                token_weights=batch.loss_scale,
                loss_tokens=batch.loss_tokens,  # known on the host, so that nothing waits for a GPU
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == arguments.steps - 1:  # item() waits for the device
            print(f"step {step}: loss {loss.item():.3f} over {batch.loss_tokens} tokens")


if __name__ == "__main__":
    main()
