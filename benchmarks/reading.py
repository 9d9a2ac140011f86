"""From files to packs: seconds to the first batch, tokens tokenised a second, ms a pack and memory.

python -m benchmarks.reading [--lines 20000] [--document 500000] [--rounds 3]

Four sources, each in a process of its own, with a tokenizer trained here on Python's standard library: a
JSONL file of short documents, Parquet chats, a Hugging Face dataset of ids, and one long document, split. The
tokenizer alone, fed the same texts in batches, is the bound of tokenising; the peer is ``datasets.map`` and
TRL's packing of the same texts, in the same run. CPU seconds are compared, which a loaded machine disturbs
less than others.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.results import faster, keep, less

CAPACITY = 8_192


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4_000,
        special_tokens=["<eos>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(documents()[:1_500], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    made.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return made


def documents() -> list[str]:
    from lightning_thd.data import stdlib_documents

    return stdlib_documents(max_bytes=2_048)


def texts(count: int) -> Iterator[str]:
    drawn = random.Random(0)
    found = documents()
    return (drawn.choice(found) for _ in range(count))


def write_sources(folder: Path, lines: int, document: int) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    make_tokenizer().save_pretrained(folder / "tokenizer")
    with (folder / "lines.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts(lines))
    chats = [
        [
            {"role": "user", "content": "What does this do?\n" + text},
            {"role": "assistant", "content": text[:200]},
        ]
        for text in texts(max(1, lines // 20))
    ]
    pq.write_table(pa.table({"messages": chats}), folder / "chats.parquet", row_group_size=512)
    drawn = random.Random(1)
    rows = [
        [drawn.randrange(4_000) for _ in range(drawn.randrange(50, 1_200))]
        for _ in range(max(1, lines // 10))
    ]
    datasets.Dataset.from_dict({"input_ids": rows, "labels": rows}).save_to_disk(str(folder / "ids"))
    with (folder / "long.txt").open("w") as file:
        written = 0
        for text in texts(10**9):
            file.write(text)
            written += len(text)
            if written >= 3 * document:
                break


def cpu_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    wall, cpu = time.perf_counter(), cpu_s()
    found = call()
    return found, time.perf_counter() - wall, cpu_s() - cpu


def ours(folder: Path, name: str) -> dict[str, float]:
    """Measure one source in this process, whose memory is then its own."""
    import datasets
    from transformers import AutoTokenizer

    from lightning_thd import THDDataModule

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    source: Any = folder / name
    if name == "ids":
        source = datasets.load_from_disk(str(source))
    with tempfile.TemporaryDirectory() as cache:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        def first() -> Any:
            data = THDDataModule(
                source, capacity=CAPACITY, tokenizer=tokenizer, oversize="split", cache_dir=cache
            )
            data.prepare_data()
            data.setup("fit")
            loader = iter(data.train_dataloader())
            return data, loader, next(loader)

        (data, loader, _), wall, cpu = timed(first)
        packs, _, later = timed(lambda: list(islice(loader, 200)))
        tokens = int(data._sets["train"].index.lengths.sum())
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "tokens": tokens,
        "first_batch_s": wall,
        "cpu_s": cpu,
        "ms_a_pack": 1e3 * later / max(1, len(packs)),
        "memory_mib": grown,
    }


def bound(folder: Path, name: str) -> dict[str, float]:
    """Tokenise the texts of the JSONL file with the tokenizer alone, a thousand at a time."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    found = [json.loads(line)["text"] for line in (folder / name).open()]

    def run() -> int:
        tokens = 0
        for at in range(0, len(found), 1_000):
            encoded = tokenizer(found[at : at + 1_000], return_attention_mask=False)["input_ids"]
            tokens += sum(map(len, encoded))
        return tokens

    tokens, wall, cpu = timed(run)
    return {"tokens": tokens, "first_batch_s": wall, "cpu_s": cpu}


def peer(folder: Path, name: str) -> dict[str, float]:
    """Tokenise and pack the same JSONL file with ``datasets.map`` and TRL, both without a cache."""
    import datasets
    import trl
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    with tempfile.TemporaryDirectory() as cache:

        def run() -> Any:
            rows = datasets.load_dataset(
                "json", data_files=str(folder / name), split="train", cache_dir=cache
            ).map(lambda batch: {"input_ids": tokenizer(batch["text"])["input_ids"]}, batched=True)
            rows = rows.select_columns(["input_ids"])
            packed = trl.pack_dataset(rows, CAPACITY, strategy="bfd")
            return packed, packed[0]

        (packed, _), wall, cpu = timed(run)
        rows, _, later = timed(lambda: [packed[i] for i in range(min(200, len(packed)))])
        tokens = sum(len(row["input_ids"]) for row in packed.select(range(min(len(packed), 10**6))))
    return {
        "tokens": tokens,
        "first_batch_s": wall,
        "cpu_s": cpu,
        "ms_a_pack": 1e3 * later / max(1, len(rows)),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


PARTS = {
    "tokenizer alone": (bound, "lines.jsonl"),
    "JSONL": (ours, "lines.jsonl"),
    "JSONL, datasets.map + TRL": (peer, "lines.jsonl"),
    "Parquet chats": (ours, "chats.parquet"),
    "HF dataset of ids": (ours, "ids"),
    "one long document": (ours, "long.txt"),
}


def main(argv: list[str] | None = None) -> None:
    """Measure every part in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=20_000, help="documents of the JSONL file")
    parser.add_argument("--document", type=int, default=500_000, help="tokens of the long document, about")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.part:
        measure, name = PARTS[given.part]
        print(json.dumps(measure(Path(given.folder), name)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder), given.lines, given.document)
        heads = ("tokens", "first batch s", "CPU s", "M tokens/CPU s", "ms a pack", "MiB")
        print(f"{'':27}" + "".join(f"{head:>15}" for head in heads))
        every: dict[str, dict[str, float]] = {}
        for part in PARTS:
            command = [sys.executable, "-m", "benchmarks.reading", "--part", part, "--folder", folder]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found = json.loads(printed.splitlines()[-1])
            rate = found["tokens"] / found["cpu_s"] / 1e6
            missing = float("nan")
            cells = (
                f"{found['tokens']:,.0f}",
                f"{found['first_batch_s']:.2f}",
                f"{found['cpu_s']:.2f}",
                f"{rate:.2f}",
                f"{found.get('ms_a_pack', missing):.2f}",
                f"{found.get('memory_mib', missing):.0f}",
            )
            print(f"{part:27}" + "".join(f"{cell:>15}" for cell in cells))
            every[part] = found | {"rate": rate}
    record(every)


def record(every: dict[str, dict[str, float]]) -> None:
    """Keep the goals: near the tokenizer alone, faster than the peer, packs in no time, memory of none."""
    alone, lines = every["tokenizer alone"], every["JSONL"]
    theirs = every["JSONL, datasets.map + TRL"]
    keep(
        "tokens tokenised a CPU second, of the tokenizer's own",
        lines["rate"] / alone["rate"],
        "",
        at_least=0.95,
    )
    faster("CPU to the first batch, JSONL, datasets.map + TRL", lines["cpu_s"], theirs["cpu_s"], "s", 1.0)
    for part, found in every.items():
        if part not in ("tokenizer alone", "JSONL, datasets.map + TRL"):
            less(f"a pack, {part}", found["ms_a_pack"], "ms", 2.0)


if __name__ == "__main__":
    main()
