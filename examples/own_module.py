"""Your own transformer, without the transformers library: packing only needs a call of varlen_attention.

python examples/own_module.py
"""

import argparse

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_thd import THDBatch, THDDataModule, THDThroughputMonitor, varlen_attention
from lightning_thd.callbacks import PackingCheck
from lightning_thd.data import ByteTokenizer, StdlibText
from lightning_thd.precision import fastest_precision


class Block(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(size), nn.RMSNorm(size)])
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.SiLU(), nn.Linear(4 * size, size))

    def forward(self, x: Tensor, batch: THDBatch) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(1)  # [T, H, D] each
        attended = varlen_attention(q, k, v, batch.boundaries, window=256)
        x = x + self.out(attended.flatten(1))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Gives the logits of a pack; as a module of its own, because PackingCheck calls it on packs."""

    def __init__(self, size: int = 128, heads: int = 4, layers: int = 2, longest: int = 2049) -> None:
        super().__init__()
        self.tokens = nn.Embedding(ByteTokenizer.vocab_size, size)
        self.positions = nn.Embedding(longest, size)
        self.blocks = nn.ModuleList([Block(size, heads) for _ in range(layers)])
        self.head = nn.Linear(size, ByteTokenizer.vocab_size)

    def forward(self, batch: THDBatch) -> Tensor:
        x = self.tokens(batch.input_ids) + self.positions(batch.position_ids)  # [T, size]
        for block in self.blocks:
            x = block(x, batch)
        return self.head(x)  # [T, vocabulary]


class OwnModule(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer()

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        # Targets are shifted already; the sum times loss_scale is the exact mean over the step's loss tokens.
        loss = F.cross_entropy(self.model(batch), batch.targets, reduction="sum") * batch.loss_scale
        self.log("train/loss", loss.detach())  # prog_bar=True would wait for a GPU in every step
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    trainer = L.Trainer(
        max_steps=args.steps,
        precision=fastest_precision(),  # bf16-mixed on a GPU that has it
        callbacks=[PackingCheck(model="model", vocab_size=ByteTokenizer.vocab_size), THDThroughputMonitor()],
        log_every_n_steps=5,
    )
    trainer.fit(OwnModule(), THDDataModule(StdlibText(max_bytes=2048), capacity=4_096))


if __name__ == "__main__":
    main()
