"""Train embeddings on packs: find the translation of a sentence among those of all other sentences.

python examples/embeddings.py             # made-up sentences of a language that spells words backwards
python examples/embeddings.py --decoder   # last token of a decoder, as Qwen3-Embedding has it

The sentences of validation are not those of training; only their words are. Under several ranks, the
negatives of a query are the documents of all ranks.
"""

import argparse
import random

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, ModernBertConfig, Qwen3Config

from lightning_thd import Sequences, THDBatch, THDDataModule, THDThroughputMonitor
from lightning_thd.loss.contrastive import embed, info_nce
from lightning_thd.precision import fastest_precision

SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_words(count: int) -> list[str]:
    draw = random.Random(0)
    return sorted({"".join(draw.choices(SYLLABLES, k=2)) for _ in range(count)})


def make_pairs(words: list[str], count: int, seed: int) -> list[dict[str, str]]:
    """Make sentences, their translations, and as hard negatives translations with two other words."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        sentence = draw.choices(words, k=draw.randint(3, 24))
        other = [*draw.choices(words, k=2), *sentence[2:]]
        translations = [" ".join(word[::-1] for word in text) for text in (sentence, other)]
        pairs.append({"query": " ".join(sentence), "positive": translations[0], "negative": translations[1]})
    return pairs


class WordTokenizer:
    """Words and words spelled backwards as ids from 1 on."""

    fingerprint = "words of two syllables"

    def __init__(self, words: list[str]) -> None:
        everything = [*words, *(word[::-1] for word in words)]
        self.ids = {word: i for i, word in enumerate(everything, start=1)}

    def __call__(self, text: str) -> list[int]:
        return [self.ids[word] for word in text.split()]


class Embedder(L.LightningModule):
    def __init__(self, vocabulary: int, *, decoder: bool) -> None:
        super().__init__()
        self.pooling = "last" if decoder else "mean"
        if decoder:
            config = Qwen3Config(vocab_size=vocabulary, num_key_value_heads=2, head_dim=16, **SIZES)
        else:
            config = ModernBertConfig(vocab_size=vocabulary, pad_token_id=0, **SIZES)
        self.model = AutoModel.from_config(config, attn_implementation="thd")
        self.found: dict[str, list[Tensor]] = {"queries": [], "documents": []}

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        loss = info_nce(self.model, batch, pooling=self.pooling, dims=(64, 16))
        self.log("train/loss", loss.detach())
        return loss

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        rows = normalize(embed(self.model, batch, pooling=self.pooling).float(), dim=-1)
        roles = torch.tensor(batch.roles, device=rows.device)
        self.found["queries"].append(rows[roles == 0])
        self.found["documents"].append(rows[roles == 1])

    def on_validation_epoch_end(self) -> None:
        queries, documents = (torch.cat(rows) for rows in self.found.values())
        self.found = {"queries": [], "documents": []}
        scores = queries @ documents.T
        rank = (scores > scores.diagonal()[:, None]).sum(1) + 1
        self.log("val/recall_at_1", (rank == 1).float().mean(), prog_bar=True)
        self.log("val/mrr", (1 / rank).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--decoder", action="store_true")
    args = parser.parse_args()
    L.seed_everything(0)
    words = make_words(200)
    data = THDDataModule(
        make_pairs(words, 3_200, seed=1),
        val=make_pairs(words, 200, seed=2),
        tokenizer=WordTokenizer(words),
        capacity=1_024,
        global_batch=Sequences(64),  # 64 queries with their documents, in as many packs as they need
    )
    trainer = L.Trainer(
        max_steps=args.steps,
        strategy="thd",
        precision=fastest_precision(),  # bf16-mixed on a GPU that has it
        callbacks=[THDThroughputMonitor(every_n_steps=10)],
        log_every_n_steps=10,
    )
    module = Embedder(2 * len(words) + 1, decoder=args.decoder)
    before = trainer.validate(module, data, verbose=False)[0]
    trainer.fit(module, data)
    after = trainer.validate(module, data, verbose=False)[0]
    for name in ("val/recall_at_1", "val/mrr"):
        print(f"{name}: {before[name]:.2f} before training, {after[name]:.2f} after")


if __name__ == "__main__":
    main()
