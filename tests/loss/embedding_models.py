"""Small embedding models, examples of queries and documents, and their loss from texts that run alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

VOCAB = 64
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}),
    "bert": ("BertConfig", {"intermediate_size": 48, "attention_probs_dropout_prob": 0.0}),
    "embeddinggemma": (
        "Gemma3TextConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "sliding_window": 6,
            "use_bidirectional_attention": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "modernbert": ("ModernBertConfig", {"intermediate_size": 48, "pad_token_id": 0, "local_attention": 6}),
}


def encoder(
    family: str,
    *,
    attention: str = "thd",
    dropout: float = 0.0,
    head: bool = False,
    dtype: Any = torch.float64,
) -> nn.Module:
    """Build a model without its head, with the same weights for every attention."""
    name, options = _CONFIGS[family]
    if family == "bert":
        options = {**options, "hidden_dropout_prob": dropout}
    config = getattr(transformers, name)(**_SIZES, **options)
    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM if head else transformers.AutoModel
    extra = {"add_pooling_layer": False} if family == "bert" else {}
    model: nn.Module = kind.from_config(config, attn_implementation=attention, **extra)
    return model.to(dtype).train()


def make_examples(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)

    def ids() -> list[int]:
        row: list[int] = rng.integers(1, VOCAB, int(rng.integers(2, 9))).tolist()
        return row

    examples = []
    for i in range(count):
        example: dict[str, Any] = {"query": ids(), "positive": [ids() for _ in range(1 + i % 2)]}
        if i % 3:
            example["negative"] = [ids() for _ in range(i % 3)]
        examples.append(example)
    return examples


# 21 sequences: six queries, each with one or two positives and up to two hard negatives
EXAMPLES = make_examples(6)


def embed_alone(model: nn.Module, ids: list[int], pooling: str) -> Tensor:
    """Embed one text by a forward pass of its own."""
    hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return {"last": hidden[-1], "first": hidden[0], "mean": hidden.mean(0)}[pooling]


def loss_by_hand(
    model: nn.Module,
    examples: list[dict[str, Any]],
    *,
    pooling: str = "last",
    temperature: float = 0.05,
    symmetric: bool = False,
    dims: tuple[int, ...] = (32,),
) -> Tensor:
    """Compare every query with all documents, one pair after the other."""
    queries = [embed_alone(model, example["query"], pooling) for example in examples]
    documents: list[tuple[int, bool, Tensor]] = []  # its example, whether it is a positive, its embedding
    for i, example in enumerate(examples):
        for key in ("positive", "negative"):
            documents += [
                (i, key == "positive", embed_alone(model, x, pooling)) for x in example.get(key, [])
            ]
    total = torch.zeros((), dtype=torch.float64)
    for size in dims:

        def score(a: Tensor, b: Tensor, size: int = size) -> Tensor:
            return torch.cosine_similarity(a[:size], b[:size], dim=0) / temperature

        for i, query in enumerate(queries):
            positives = [d for owner, positive, d in documents if owner == i and positive]
            others = [score(query, d) for owner, positive, d in documents if owner != i or not positive]
            for document in positives:
                similarity = score(query, document)
                loss = torch.stack([similarity, *others]).logsumexp(0) - similarity
                if symmetric:
                    back = torch.stack([score(other, document) for other in queries])
                    loss = (loss + back.logsumexp(0) - similarity) / 2
                total = total + loss / len(positives) / len(queries)
    return total


def largest_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference of gradients, relative to the largest entry."""
    assert found.keys() == wanted.keys()
    scale = max(float(x.abs().max()) for x in wanted.values())
    assert scale > 0
    return max(float((found[name] - x).abs().max()) for name, x in wanted.items()) / scale
