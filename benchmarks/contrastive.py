"""Training embeddings on packs and on padded batches: python -m benchmarks.contrastive.

A query is the first paragraph of a docstring of Python's standard library, its positive the rest of the
function. A step has 32 of these pairs, as bytes, up to 2,048 of them a document. The model is an encoder of
the BERT kind (hidden 128, 2 layers, 4 heads, mean of the tokens, fp32). The padded way is that of
sentence-transformers: queries padded to the longest query, documents to the longest document, attention of
torch with a mask. Packed and padded steps take turns, each forward and backward, collation included. Goal:
3 times the tokens a second. A third way cuts the step into packs of 8,192 tokens with cached gradients, which
runs each pack forward twice. The losses of the ways are compared; where sentence-transformers is installed,
with its MultipleNegativesRankingLoss too.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, BertConfig

from benchmarks.clock import Load, take_turns
from benchmarks.results import pair
from lightning_thd import Sequences, THDBatch, THDDataModule
from lightning_thd.batch.examples import places_of
from lightning_thd.data import ByteTokenizer, stdlib_documents
from lightning_thd.loss.contrastive import embed, info_nce, pair_losses

GOAL = 3.0
QUERIES, LONGEST, CAPACITY = 32, 2_048, 8_192
Example = dict[str, list[int]]


def examples() -> list[Example]:
    """Return docstrings and their functions as bytes, in an order drawn once."""
    tokenizer, found = ByteTokenizer(), []
    for source in stdlib_documents():
        node = ast.parse(source.lstrip()).body[0] if source.startswith("def ") else None
        if not isinstance(node, ast.FunctionDef) or not (text := ast.get_docstring(node)):
            continue
        code = "\n".join(ast.unparse(part) for part in node.body[1:])
        texts = {"query": text.split("\n\n")[0], "positive": f"def {node.name}:\n{code}"}
        found.append({key: tokenizer(x)[:LONGEST].tolist() for key, x in texts.items()})
    order = np.random.default_rng(0).permutation(len(found))
    return [found[i] for i in order]


def model_of(attention: str) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=260, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=LONGEST, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    model: nn.Module = AutoModel.from_config(config, attn_implementation=attention, add_pooling_layer=False)
    return model


def padded_embeddings(model: nn.Module, rows: Sequence[list[int]]) -> Tensor:
    """Embed rows padded to the longest."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    ids[mask] = torch.tensor([token for row in rows for token in row])
    hidden = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    sums: Tensor = (hidden * mask[..., None]).sum(1)
    return sums / lengths[:, None]


def padded_loss(model: nn.Module, members: Sequence[Example]) -> Tensor:
    queries, documents = (
        padded_embeddings(model, [x[key] for x in members]) for key in ("query", "positive")
    )
    return pair_losses(queries, documents).mean()


def packed_loss(model: nn.Module, members: Sequence[Example]) -> Tensor:
    return info_nce(model, THDBatch.collate(list(members)), pooling="mean")


def trained(loss_of: Callable[..., Tensor], model: nn.Module, members: Sequence[Example]) -> float:
    """Run a step forward and backward and return its loss."""
    model.zero_grad()
    loss = loss_of(model, members)
    loss.backward()
    return loss.item()


def trained_by_packs(model: nn.Module, members: Sequence[Example]) -> float:
    """Run a step in packs of at most ``CAPACITY`` tokens, with cached gradients."""
    model.zero_grad()
    data = THDDataModule(list(members), capacity=CAPACITY, global_batch=Sequences(len(members)))
    data.setup("fit")
    (step,) = data.train_steps()
    total = 0.0
    for batch in step.microbatches:
        loss = info_nce(model, batch, pooling="mean") / len(step)
        loss.backward()
        total += loss.item()
    return total


def of_sentence_transformers(model: nn.Module, members: Sequence[Example]) -> float | None:
    """Return the loss of sentence-transformers on the packed embeddings; None where it is not installed."""
    if find_spec("sentence_transformers") is None:
        return None
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    batch = THDBatch.collate(list(members))
    with torch.no_grad():
        rows = embed(model, batch, pooling="mean")
    places = places_of(batch.roles or ())
    columns = [rows[places.queries], rows[places.documents]]
    loss: Any = MultipleNegativesRankingLoss(model)
    found: Tensor = loss.compute_loss_from_embeddings(columns, None)
    return found.item()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    load, pairs = Load(), examples()
    packed, padded = model_of("thd"), model_of("sdpa")
    steps = [pairs[at : at + QUERIES] for at in range(0, QUERIES * (given.rounds + 1), QUERIES)]
    tokens = [sum(len(row) for x in members for row in x.values()) for members in steps[1:]]
    slots = [
        sum(QUERIES * max(len(x[key]) for x in members) for key in ("query", "positive"))
        for members in steps[1:]
    ]
    print(f"{len(pairs)} pairs; a step has {np.mean(tokens):,.0f} tokens, padded {np.mean(slots):,.0f} slots")

    losses: dict[str, list[float]] = {"packed": [], "by packs": [], "padded": []}

    def way(name: str, run: Callable[[Sequence[Example]], float]) -> Callable[[], None]:
        def one() -> None:
            losses[name].append(run(steps[len(losses[name])]))

        return one

    found = take_turns(
        {
            "packed": way("packed", partial(trained, packed_loss, packed)),
            "by packs": way("by packs", partial(trained_by_packs, packed)),
            "padded": way("padded", partial(trained, padded_loss, padded)),
        },
        given.rounds,
    )
    work = float(np.mean(tokens))
    print(f"{'way':<12}{'tokens/s':>10}{'CPU s':>8}{'wall s':>8}{'times padded':>14}")
    for name, times in found.items():
        ratio = times.times(found["padded"])
        print(f"{name:<12}{work / times.wall_s:>10,.0f}{times.cpu_s:>8.2f}{times.wall_s:>8.2f}{ratio:>14.2f}")
    what = "embeddings of docstrings and functions, 32 pairs a step"
    result = pair(what, found["packed"], found["padded"], GOAL, precision="fp32", work=work)
    print(f"goal {GOAL:.0f}x: {'met' if result.met else 'MISSED'} ({result.ratio or 0:.2f}x)")
    apart = max(abs(a - b) for values in zip(*losses.values(), strict=True) for a in values for b in values)
    print(f"largest difference between the losses of the three ways: {apart:.1e}")
    peer = of_sentence_transformers(packed, steps[0])
    if peer is None:
        print("sentence-transformers is not installed")
    else:
        print(f"difference to its MultipleNegativesRankingLoss: {abs(peer - losses['packed'][0]):.1e}")
    print(f"others kept {load.others():.1f} cores busy")


if __name__ == "__main__":
    main()
