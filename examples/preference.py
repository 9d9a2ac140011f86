"""Preference training on packs: chosen and rejected answers in one pack, DPO against a frozen reference.

python examples/preference.py
"""

import argparse

import torch
from quickstart import make_model

from lightning_thd.loss import PackedRollouts, preference
from lightning_thd.precision import fastest_precision


def make_pairs(pairs: int, columns: int) -> PackedRollouts:
    """Pack random prompts with two answers each: the chosen ones in the first half of the rows."""
    prompt = torch.randint(0, 256, (pairs, 4)).repeat(2, 1)
    ids = torch.cat([prompt, torch.randint(0, 256, (2 * pairs, columns - 4))], dim=1)
    ids[:pairs, 4:] = ids[:pairs, 4:] // 2  # in this toy task, small bytes make an answer good
    lengths = torch.randint(8, columns + 1, (2 * pairs,))
    attention_mask = (torch.arange(columns) < lengths[:, None]).long()
    response_mask = attention_mask * (torch.arange(columns) >= 4)
    return PackedRollouts.from_padded(ids, attention_mask, response_mask=response_mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bf16 = torch.autocast(device, torch.bfloat16, enabled=fastest_precision() == "bf16-mixed")
    model, reference = make_model().to(device), make_model().to(device)
    reference.load_state_dict(model.state_dict())
    reference.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(arguments.steps):
        rollouts = make_pairs(pairs=8, columns=48).to(device)
        with torch.no_grad(), bf16:
            reference_logps = rollouts.sequence_logprobs(reference)
        with bf16:
            logps = rollouts.sequence_logprobs(model)
            loss = preference.dpo_loss(*logps.chunk(2), *reference_logps.chunk(2), beta=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == arguments.steps - 1:  # item() waits for the device
            chosen, rejected = (logps - reference_logps).detach().chunk(2)
            right = (chosen > rejected).float().mean().item()
            print(f"step {step}: loss {loss.item():.3f}, {right:.0%} of the pairs in the right order")


if __name__ == "__main__":
    main()
