"""One training step by hand, without Lightning: every stage of a plain step, with its numbers.

python examples/one_step_by_hand.py
"""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_thd import Packs, causal_lm_loss, varlen_attention
from lightning_thd.data import BatchMaker, PlannedSteps, THDLoader, build_index
from lightning_thd.loss import fused_linear_cross_entropy
from lightning_thd.models import packed
from lightning_thd.packing import PackPlanner


def main() -> None:
    torch.manual_seed(0)

    # 1. Read a source into a table of lengths and loss tokens. Every row is checked here, once.
    texts = ["packed", "training", "of", "many", "short", "documents"]
    dataset = [{"input_ids": list(text.encode())} for text in texts]
    index = build_index(dataset)
    print("1  lengths          ", index.lengths.tolist(), "loss tokens", index.loss_tokens.tolist())

    # 2. Plan a step: which sequences make which pack on which rank, and the scale of its loss.
    planner = PackPlanner(index.lengths, 16, global_batch=Packs(2), loss_tokens=index.loss_tokens)
    plan = planner.step(0, 0, dp=1)
    print("2  packs of step 0  ", [pack.tolist() for pack in plan.indices_by_rank()[0]])

    # 3. The loader asks for one batch after the other, and knows its position for checkpoints. The step has
    #    two packs, and one rank runs both: two batches per step.
    loader = THDLoader(PlannedSteps(planner, BatchMaker(dataset=dataset, index=index), per_step=2))

    # 4. Collate: the rows end to end, with cu_seqlens, positions from zero and the next token as target.
    batch = next(iter(loader))
    print("4  input_ids        ", batch.input_ids.tolist())
    print("   cu_seqlens       ", batch.cu_seqlens.tolist(), "of sequences", list(batch.sequence_ids))
    print("   loss_scale       ", f"{batch.loss_scale:.4f} = 2 microbatches / loss tokens of the step")

    # 5. Move the batch to the device of the model. Lengths stay on the host.
    model = AutoModelForCausalLM.from_config(tiny(), attn_implementation="thd").train()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    batch = batch.to(model.device)

    # 6. causal_lm_loss does the stages 7 to 12, which follow one by one.
    loss = causal_lm_loss(model, batch)

    # 7. Announce the batch to the layers; the head is left out, so no logits exist. hf_kwargs() carries the
    #    boundaries too: the announcement is for calls whose arguments do not.
    with packed(batch):
        # 8. The model's own forward runs. 9. Each layer finds the boundaries of the batch and its kernel.
        hidden = model.model(**batch.hf_kwargs()).last_hidden_state[0]
    print("8  hidden states    ", list(hidden.shape))

    # 10. What the kernel computes: attention inside every sequence, never across.
    q = k = v = torch.randn(len(batch.input_ids), 2, 8, device=model.device)
    whole = varlen_attention(q, k, v, batch.boundaries)
    first = slice(0, batch.lengths[0])
    part = torch.nn.functional.scaled_dot_product_attention(
        *(x[first].transpose(0, 1) for x in (q, k, v)), is_causal=True
    )
    print("10 attention differs ", f"{(whole[first] - part.transpose(0, 1)).abs().max():.0e}")

    # 11. The fused loss computes the sum over targets from hidden states and the head's weight, in tiles.
    summed = fused_linear_cross_entropy(hidden, model.lm_head.weight, batch.targets, reduction="sum")

    # 12. The sum times the scale is this microbatch's share. The mean over microbatches is the step's loss.
    share = summed * batch.loss_scale
    print("12 loss             ", f"{share:.4f}, by causal_lm_loss {loss:.4f}")
    torch.testing.assert_close(share, loss)

    # The check: run every sequence of the pack separately, with transformers' attention and torch's loss.
    model.set_attn_implementation("eager")
    unpacked = sum(one_sequence(model, texts[i]) for i in batch.sequence_ids)
    print("   one at a time    ", f"{unpacked * batch.loss_scale:.4f}")
    torch.testing.assert_close(share, unpacked * batch.loss_scale)

    loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()


def one_sequence(model: torch.nn.Module, text: str) -> torch.Tensor:
    ids = torch.tensor([list(text.encode())], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")


def tiny() -> Qwen3Config:
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)


if __name__ == "__main__":
    main()
