"""Real tokens per second of a model on the same documents: ours, transformers' flattened batch, padded.

python -m benchmarks.end_to_end [--documents 64] [--rounds 3]

The quickstart's Qwen3 trains on the standard library's functions, forward, backward and AdamW, in fp32 and
under bf16 autocast, ours with compiled layers and without. Every way gets the same documents in every round,
ours in packs of 8,192 tokens. Flattened is transformers' own packed batch (DataCollatorWithFlattening:
position_ids, sdpa, the model's own loss). Padded is batches of 8 rows, dealt at random. Padded by length is
batches of 8 rows of like length, as transformers makes them of all functions for ``group_by_length``. How
full both are is printed, and is part of the names of their rows.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Qwen3Config
from transformers.trainer_pt_utils import LengthGroupedSampler

from benchmarks.clock import Times, take_turns
from benchmarks.results import pair
from lightning_thd import FlopsModel, THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.data import ByteTokenizer, StdlibText
from lightning_thd.flops import SeqStats
from lightning_thd.module import adamw

CAPACITY = 8_192
ROWS = 8  # of a padded batch
Step = Callable[[nn.Module], Tensor]


def make_model(attention: str) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        vocab_size=ByteTokenizer.vocab_size,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def packs(documents: int) -> list[THDBatch]:
    """Pack a sample of the documents of the data set.

    The sample is drawn from the batches that transformers makes of all documents for ``group_by_length``. It
    chooses rows of like length among hundreds of documents; a sample of single documents would leave it few.
    In the order of their lengths, the drawn batches are equally far apart, so that short and long documents
    are as frequent as in the data set. Packs of the whole set would not do: some hold a few long documents
    and some a hundred short ones, and with them changes what padding costs.
    """
    whole = THDDataModule(StdlibText(max_bytes=2048), capacity=CAPACITY, oversize="split")
    whole.setup("fit")
    all_ids = [ids for batch in whole.train_dataloader() for ids in batch.unpack(batch.input_ids)]
    lengths = [len(ids) for ids in all_ids]

    batches = batches_of_like_length(lengths)
    batches.sort(key=lambda batch: sum(lengths[i] for i in batch))
    count = -(-documents // ROWS)
    drawn = [batches[(2 * k + 1) * len(batches) // (2 * count)] for k in range(count)]

    sample = [{"input_ids": all_ids[i]} for batch in drawn for i in batch]
    data = THDDataModule(sample[:documents], capacity=CAPACITY)
    data.setup("fit")
    return list(data.train_dataloader())


def batches_of_like_length(lengths: list[int]) -> list[list[int]]:
    """Return the indices of the full padded batches of an epoch of transformers' own sampler."""
    sampler = LengthGroupedSampler(ROWS, lengths=lengths, generator=torch.Generator().manual_seed(0))
    order = list(sampler)
    return [order[i : i + ROWS] for i in range(0, len(order) - ROWS + 1, ROWS)]


def ours(batches: list[THDBatch]) -> list[Step]:
    return [lambda model, batch=batch: causal_lm_loss(model, batch) for batch in batches]


def flattened(batches: list[THDBatch]) -> list[Step]:
    return [_flattened_step(batch) for batch in batches]


def _flattened_step(batch: THDBatch) -> Step:
    documents = [{"input_ids": ids.tolist()} for ids in batch.unpack(batch.input_ids)]
    inputs = DataCollatorWithFlattening(return_tensors="pt")(documents)
    return lambda model: model(**inputs, use_cache=False).loss


def padded(batches: list[THDBatch]) -> list[Step]:
    documents = [ids for batch in batches for ids in batch.unpack(batch.input_ids)]
    return [_padded_step(rows) for rows in padded_rows(documents)]


def padded_rows(documents: list[Tensor]) -> list[list[Tensor]]:
    """Deal documents into padded batches at random."""
    shuffled = random.Random(0).sample(documents, len(documents))
    return [shuffled[i : i + ROWS] for i in range(0, len(shuffled), ROWS)]


def grouped(batches: list[THDBatch]) -> list[Step]:
    documents = [ids for batch in batches for ids in batch.unpack(batch.input_ids)]
    return [_padded_step(rows) for rows in rows_by_length(documents)]


def rows_by_length(documents: list[Tensor]) -> list[list[Tensor]]:
    """Deal documents into padded batches of like length: sorted, no other batches have less padding."""
    alike = sorted(documents, key=len)
    return [alike[i : i + ROWS] for i in range(0, len(alike), ROWS)]


def fill(rows: list[list[Tensor]]) -> float:
    """Return the share of the slots of padded batches that hold a token."""
    slots = sum(len(batch) * max(map(len, batch)) for batch in rows)
    return sum(len(ids) for batch in rows for ids in batch) / slots


def _padded_step(documents: list[Tensor]) -> Step:
    ids = nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in documents], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    return lambda model: model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to train: which attention, what a step is, in which precision, with compiled layers or not."""

    attention: str
    steps: Callable[[list[THDBatch]], list[Step]]
    dtype: torch.dtype = torch.float32
    compiled: bool = False


def ways_of(dtype: torch.dtype) -> dict[str, Way]:
    """All ways of a precision; ours first, compiled."""
    return {
        "ours, compiled": Way(attention="thd", steps=ours, dtype=dtype, compiled=True),
        "ours": Way(attention="thd", steps=ours, dtype=dtype),
        "padded": Way(attention="sdpa", steps=padded, dtype=dtype),
        "padded by length": Way(attention="sdpa", steps=grouped, dtype=dtype),
        "flattened": Way(attention="sdpa", steps=flattened, dtype=dtype),
    }


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
WAYS = {f"{name}, {word}": way for word, dtype in PRECISIONS.items() for name, way in ways_of(dtype).items()}
# (ours, peer, how many times faster)
GOALS = (
    ("ours, compiled, fp32", "padded, fp32", 3.0),
    ("ours, compiled, bf16", "padded, bf16", 3.0),
    ("ours, compiled, bf16", "padded, fp32", 5.0),
    ("ours, fp32", "padded, fp32", 3.0),
    ("ours, compiled, fp32", "padded by length, fp32", 1.0),
    ("ours, compiled, bf16", "padded by length, bf16", 1.0),
    ("ours, fp32", "padded by length, fp32", 1.0),
    ("ours, bf16", "padded by length, bf16", 1.0),
    ("ours, fp32", "flattened, fp32", 5.0),
    ("ours, bf16", "flattened, bf16", 5.0),
    ("ours, compiled, fp32", "flattened, fp32", 5.0),
    ("ours, compiled, bf16", "flattened, bf16", 5.0),
    ("ours, compiled, fp32", "ours, fp32", 1.0),
    ("ours, compiled, bf16", "ours, bf16", 1.0),
)


def rounds_of(way: Way, batches: list[THDBatch]) -> Callable[..., None]:
    """Return a function that trains one round: a step for each of the way's batches, or for some."""
    model = make_model(way.attention)
    if way.compiled:
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.compile(dynamic=True)
    optimizer = adamw(model.parameters(), lr=1e-4, betas=(0.9, 0.999))
    steps = way.steps(batches)

    def run(some: int | None = None) -> None:
        for step in steps[:some]:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=way.dtype, enabled=way.dtype != torch.float32):
                loss = step(model)
            loss.backward()
            optimizer.step()

    return run


def measure(batches: list[THDBatch], rounds: int, wanted: list[str]) -> tuple[dict[str, Times], list[str]]:
    """Time the rounds of every way, the ways taking turns; a slow one counts once less.

    Returns:
        The times, and what compiling took, as sentences.
    """
    runs = {name: rounds_of(WAYS[name], batches) for name in wanted}
    compiling: dict[str, float] = {}
    for name in wanted:  # a first step warms up; a whole round compiles for every size
        begun = time.perf_counter()
        runs[name](None if WAYS[name].compiled else 1)
        compiling[name] = time.perf_counter() - begun
    slow = {name: max(1, rounds - 1) for name in wanted if name.startswith("flattened")}
    found = take_turns(runs, rounds, warm_up=0, most=slow)
    said = []
    for word in PRECISIONS:
        fast, plain = f"ours, compiled, {word}", f"ours, {word}"
        if fast in found and plain in found:
            each = [found[name].wall_s / len(batches) for name in (plain, fast)]
            cost = compiling[fast] - found[fast].wall_s
            gain = each[0] - each[1]
            when = f"after {cost / gain:,.0f} steps" if gain > 0 else "never here"
            said.append(f"{word}: compiling took {cost:.1f} s and pays off {when}")
    return found, said


def floor_seconds(batches: list[THDBatch], dtype: torch.dtype = torch.float32) -> tuple[float, float, float]:
    """Return the FLOPs of the batches, the matmul rate measured here, and FLOPs / rate."""
    model = make_model("thd")
    flops_model: Any = FlopsModel.from_config(model.config)
    flops = sum(
        float(flops_model.training_flops(SeqStats.from_lengths(b.lengths, windows=flops_model.windows)).model)
        for b in batches
    )
    a, b = torch.randn(CAPACITY, 256).to(dtype), torch.randn(256, 768).to(dtype)
    times = take_turns({"product": lambda: torch.mm(a, b)}, 30)["product"]
    busy = times.cpu_s / torch.get_num_threads()  # as if nothing else ran
    rate = 2 * CAPACITY * 256 * 768 / busy
    return flops, rate, flops / rate


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    args = parser.parse_args(argv)
    batches = packs(args.documents)
    tokens = sum(batch.stats.real_tokens for batch in batches)
    rows = [ids for batch in batches for ids in batch.unpack(batch.input_ids)]
    lengths = [len(ids) for ids in rows]
    filled = {"padded": fill(padded_rows(rows)), "padded by length": fill(rows_by_length(rows))}
    print(
        f"{len(rows)} documents of {min(lengths)} to {max(lengths)} tokens, {tokens:,} in all, "
        f"{torch.get_num_threads()} threads; batches of {ROWS} rows are {filled['padded']:.0%} filled at "
        f"random, {filled['padded by length']:.0%} by length"
    )
    found, said = measure(batches, args.rounds, [name for name in WAYS if name in args.ways])
    print(f"{'way':26}{'tokens/s':>10}{'tokens/CPU s':>14}{'spread':>8}")
    for name, times in found.items():
        rates = f"{tokens / times.wall_s:10,.0f}{tokens / times.cpu_s:14,.0f}"
        print(f"{name:26}{rates}{times.spread:8.0%}")
    for mine, peer, goal in GOALS:
        if mine in found and peer in found:
            what = f"training, {mine} / {peer}"
            rows_of_peer = peer.rpartition(", ")[0]
            if rows_of_peer in filled:
                what += f", {filled[rows_of_peer]:.0%} filled"
            precision = mine.rpartition(", ")[2]
            row = pair(what, found[mine], found[peer], goal, precision=precision, work=tokens)
            print(f"{row.what}: {row.ratio:.2f}x, goal {row.goal}, {'met' if row.met else 'MISSED'}")
    for sentence in said:
        print(sentence)
    for word, dtype in PRECISIONS.items():
        flops, rate, floor = floor_seconds(batches, dtype)
        print(
            f"{word} floor: {flops / 1e9:,.0f} GFLOP at {rate / 1e9:,.0f} GFLOP/s, the rate of the MLP's "
            f"product here, is {tokens / floor:,.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
