"""GRPO on a toy reward in plain Lightning: a prompt is computed once for all of its answers.

The policy learns to answer with the lower half of its vocabulary. Every step samples 8 answers to each
prompt, scores them, and learns from their group's advantages.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_thd.loss import causal_lm_logprobs
from lightning_thd.loss.policy import group_advantages, grpo_loss
from lightning_thd.loss.rollouts import PackedRollouts
from lightning_thd.precision import fastest_precision

VOCABULARY, PROMPT, ANSWER, GROUP = 16, 12, 4, 8


class GRPO(L.LightningModule):
    def configure_model(self) -> None:
        if hasattr(self, "model"):  # Lightning calls this again for validate and test
            return
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="thd").train()

    @torch.no_grad()
    def sample(self, prompts: Tensor) -> Tensor:
        """Draw an answer to every prompt, token by token."""
        ids = prompts
        for _ in range(ANSWER):
            rows = PackedRollouts.from_padded(ids, torch.ones_like(ids), share_prefixes=True)
            logits = self.model(**rows.batch.hf_kwargs()).logits
            last = torch.stack([row[-1] for row in rows.batch.unpack(logits)])
            ids = torch.cat([ids, last.softmax(-1).multinomial(1)], dim=1)
        return ids

    def training_step(self, prompts: Tensor, batch_idx: int) -> Tensor:
        ids = self.sample(prompts.repeat_interleave(GROUP, dim=0))
        rewards = (ids[:, PROMPT:] < VOCABULARY // 2).float().mean(1)
        response = torch.zeros_like(ids)
        response[:, PROMPT:] = 1
        rollouts = PackedRollouts.from_padded(
            ids, torch.ones_like(ids), response_mask=response, share_prefixes=True
        )
        logp = causal_lm_logprobs(self.model, rollouts.batch, entropy=False).logp
        advantages = group_advantages(rewards, GROUP)
        loss = grpo_loss(logp, logp.detach(), advantages, rollouts)
        self.log("train/reward", rewards.mean(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    prompts = torch.randint(0, VOCABULARY, (8 * steps, PROMPT))
    trainer = L.Trainer(
        max_steps=steps,
        precision=fastest_precision(),  # bf16-mixed on a GPU that has it
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(GRPO(), torch.utils.data.DataLoader(prompts, batch_size=8))
    print(f"mean reward: {float(trainer.callback_metrics['train/reward']):.2f}")


if __name__ == "__main__":
    main()
