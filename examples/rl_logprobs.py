"""Log-probabilities and entropies of padded rollouts, computed on packs and without logits.

python examples/rl_logprobs.py
"""

import torch
from quickstart import make_model

from lightning_thd.loss import PackedRollouts, causal_lm_logprobs
from lightning_thd.precision import fastest_precision


def main() -> None:
    torch.manual_seed(0)
    rows, columns = 6, 48
    input_ids = torch.randint(0, 256, (rows, columns))
    lengths = torch.tensor([48, 9, 30, 17, 25, 40])
    attention_mask = (torch.arange(columns) < lengths[:, None]).long()
    response_mask = attention_mask * (torch.arange(columns) >= 4)  # the first four tokens are the prompt
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bf16 = torch.autocast(device, torch.bfloat16, enabled=fastest_precision() == "bf16-mixed")
    advantages = torch.randn(rows).to(device)

    rollouts = PackedRollouts.from_padded(input_ids, attention_mask, response_mask=response_mask).to(device)
    print(f"{rows} x {columns} = {rows * columns} slots padded, {len(rollouts.batch.input_ids)} packed")

    model = make_model().to(device)
    with bf16:
        logprobs = causal_lm_logprobs(model, rollouts.batch)
    per_row = rollouts.sums(logprobs.logp)  # [rows], differentiable
    entropy = rollouts.means(logprobs.entropy)
    loss = -(per_row * advantages).sum() / rollouts.batch.loss_tokens
    loss.backward()
    print("log-probability of every response:", [round(x, 1) for x in per_row.tolist()])
    print("mean entropy:", [round(x, 2) for x in entropy.tolist()])


if __name__ == "__main__":
    main()
