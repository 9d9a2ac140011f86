"""benchmarks/results.json, GPU.md and FAMILIES.md -> every measured figure of the README and the pages.

``python -m benchmarks.figures`` writes the marked regions of the README and the pages again. A region stands
between ``<!-- figures: NAME -->`` and ``<!-- figures end -->`` and is never edited by hand. Figures in other
sentences are listed in ``CITED`` with the row that they come from, or with the reason why no row has them;
``tests/benchmarks/test_figures.py`` compares all of them, and fails for a figure that is in neither.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from benchmarks import fits
from benchmarks.results import Result

ROOT = Path(__file__).parent.parent
HERE = ROOT / "benchmarks"
# A row is listed as a shortcoming if it is worse than this share of its peer, whether its goal allows that
# or not; a missed goal from a little nearer to the peer on.
WORSE, MISSED = 0.9, 0.95
_REGION = re.compile(r"(<!-- figures: (\w+) -->\n)(?:.*?\n)??(<!-- figures end -->)", re.S)


# ---- The tables


def results() -> dict[str, list[Result]]:
    """Read the rows of RESULTS.md by benchmark."""
    parts = json.loads((HERE / "results.json").read_text())
    return {part["name"]: [Result(**row) for row in part["results"]] for part in parts}


def row(benchmark: str, name: str, precision: str | None = None) -> Result:
    """Return the row of a benchmark with this name, else the only one whose name starts so."""
    rows = [one for one in results()[benchmark] if precision in (None, one.precision)]
    exact = [one for one in rows if one.what == name]
    matching = exact or [one for one in rows if one.what.startswith(name)]
    if len(matching) != 1:
        raise ValueError(f"{benchmark} has {len(matching)} rows {name!r} ({precision}); wanted one.")
    return matching[0]


def gpu(machine: str, case: str) -> str:
    """Return the figures of a row of GPU.md's tables of speed; ``machine`` is H200 or H100."""
    heads = {"H200": r"\| case \| figure \|\n", "H100": r"\| case, on an H100 \| figure \|\n"}
    table = re.search(heads[machine] + r"((?:\|.*\n)+)", (HERE / "GPU.md").read_text())
    assert table is not None, machine
    cells = [line.strip("| \n").split(" | ", 1) for line in table[1].splitlines()[1:]]
    exact = [figures for name, figures in cells if name == case]
    texts = exact or [figures for name, figures in cells if name.startswith(case)]
    if len(texts) != 1:
        raise ValueError(f"GPU.md has {len(texts)} rows {case!r} of the {machine}; wanted one.")
    return texts[0]


def gpu_number(machine: str, case: str, unit: str, nth: int = 0) -> float:
    """Return a number with this unit in a row of GPU.md, the first one if not told otherwise."""
    text = gpu(machine, case)
    numbers = re.findall(rf"(\d[\d,.]*),? {re.escape(unit)}", text)
    if len(numbers) <= nth:
        raise ValueError(f"GPU.md, {machine}, {case!r}: no number {nth} in {unit} in {text!r}.")
    return float(numbers[nth].replace(",", ""))


def families() -> dict[str, int]:
    """Return the counts of FAMILIES.md for causal models, and their sum under ``all``."""
    text = (HERE / "FAMILIES.md").read_text()
    head, line = re.findall(r"^\| (?:table|causal) \| (.*) \|$", text, re.M)
    counts = dict(zip(head.split(" | "), map(int, line.split(" | ")), strict=True))
    return counts | {"all": sum(counts.values())}


def dates() -> dict[str, str]:
    """Return the days of the tables, and the processor of the CPU's rows."""
    parts = json.loads((HERE / "results.json").read_text())
    days = sorted(part["when"][:10] for part in parts if part["when"])
    on_gpu = gpu_days().values()
    return {
        "cpu": _span(days[0], days[-1]),
        "gpu": _span(min(on_gpu), max(on_gpu)),
        "machine": parts[0]["machine"].partition(", Python")[0],
    }


def gpu_days() -> dict[str, str]:
    """Return the day of the run on each machine of GPU.md."""
    return dict(re.findall(r"^(H[12]00): ([\d-]{10})", (HERE / "GPU.md").read_text(), re.M))


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


# ---- Numbers in words


def times(ratio: float) -> str:
    """Write a ratio: 0.93x, 1.07x, 5.2x, 97x."""
    if ratio >= 9.95:
        return f"{ratio:.0f}x"
    return f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x"


RATE = "real tokens/s"
ROWS = {
    "padded": "1B in Lightning, 8k tokens, AdamW: padded rows",
    "flattened": "flattened rows with flash-attn 2",
    "packs": "our packs",
    "graphs": "our packs with graphs",
}
LIGER = "loss, 32,768 tokens x 151,936, forward and backward"
SMALL = "125M, 8 documents in 8,192, AdamW"


def one_b(machine: str) -> dict[str, float]:
    """Return the tokens a second of training 1B on a machine; padded rows did not fit on the H100."""
    ways = [way for way in ROWS if machine == "H200" or way != "padded"]
    return {way: gpu_number(machine, ROWS[way], RATE) for way in ways}


def against(machine: str, peer: str) -> str:
    """Write how many times a peer's tokens a second ours are, without CUDA graphs and with them."""
    rates = one_b(machine)
    return f"{times(rates['packs'] / rates[peer])}, with graphs {times(rates['graphs'] / rates[peer])}"


@cache
def padded_rows() -> str:
    """Describe the padded rows of the 1B training: how many in a batch, and how full they are."""
    from benchmarks.gpu_lightning import CASES, STEPS, corpus, padded

    tokens, middle = CASES["1B"][5:]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*pin_memory")  # of a loader that is read without a GPU
        batches = list(islice(padded(corpus(tokens, middle), tokens), STEPS))
    real = sum(sum(batch["real"]) for batch in batches)
    slots = sum(batch["input_ids"].numel() for batch in batches)
    return f"{len(batches[0]['input_ids'])} rows, {real / slots:.0%} filled"


def on_cpu(peer: str) -> str:
    """Write how many times a peer's tokens a second ours are on a CPU, and how full the peer's rows are."""
    start = f"training, ours, fp32 / {peer}, fp32"
    rows = [one for one in results()["end_to_end"] if one.what.startswith(start)]
    if not rows:
        return f"{peer}: not measured yet"
    filled = rows[0].what.removeprefix(start)  # such as ", 97% filled"
    return f"{peer}{filled}: {times(rows[0].ratio or 0)}"


# ---- The regions


def headline() -> str:
    """Say what a reader of the first screen wants to know: speed on a GPU, and what is exact."""
    counts = families()
    return (
        f"{fair()} Of {counts['all']} causal families of transformers, **{counts['exact']} are "
        f"exact and {counts['wrong']} wrong**; others are refused or lack a reference."
    )


def fair() -> str:
    """Compare the speed on GPUs with padded rows and with the fair peer."""
    h200, h100 = one_b("H200"), one_b("H100")
    days = gpu_days()
    padded = times(h200["packs"] / h200["padded"])
    flat, flat_graphs = (times(h200[way] / h200["flattened"]) for way in ("packs", "graphs"))
    other, other_graphs = (times(h100[way] / h100["flattened"]) for way in ("packs", "graphs"))
    return (
        f"On an H200 ({days['H200']}), 1B parameters train at **{h200['packs']:,.0f} tokens/s**: {padded} "
        f"padded rows, and {flat} flattened rows with flash-attn 2 ({flat_graphs} with CUDA graphs); on an "
        f"H100 ({days['H100']}), {other} ({other_graphs})."
    )


def verdicts() -> str:
    """Say what became of every causal family."""
    counts = families()
    return (
        f"Of {counts['all']} causal families of transformers, {counts['exact']} are exact, "
        f"{counts['wrong']} wrong and {counts['refused']} refused with a reason. "
        f"{counts['no reference']} have no reference, and {counts['not built']} could not be built."
    )


def speed(rows: int) -> str:
    """Make the table of speed: what a reader cares about first, the fair peer beside the others."""
    h200, h100 = one_b("H200"), one_b("H100")
    ours_ms, liger_ms = (gpu_number("H100", LIGER, "ms", nth) for nth in (0, 1))
    ours_gib, torch_gib = (gpu_number("H100", LIGER, "GiB", nth) for nth in (0, 2))
    plain = row("end_to_end", "training, ours, fp32 / flattened, fp32").ours
    compiled = row("end_to_end", "training, ours, compiled, fp32 / flattened, fp32").ours
    loop = [row("attention", f"{n} random documents, forward and backward", "fp32") for n in (16, 512)]
    dense = [row("attention", f"{n} random documents, dense mask") for n in (16, 512)]
    loss = row("loss", "scalar loss, V=151,936, fastest peer")
    memory = row("loss", "scalar loss, V=151,936, memory")
    plan = row("packing", "plan 1,000,000, long@8k, TRL")
    chat = row("loading", "collate chat 8k, labels, flattening")
    shared = row("prefixes", "prefixes, group 8, prompt 1024, answer 128: a step")
    lines = [
        (
            "training 1B, H200, 8,192 tokens, AdamW",
            f"{h200['packs']:,.0f} tokens/s, with graphs {h200['graphs']:,.0f}",
            f"flattened, flash-attn 2: {against('H200', 'flattened')}",
            f"padded, {padded_rows()}: {against('H200', 'padded')}",
        ),
        (
            "the same, H100",
            f"{h100['packs']:,.0f} tokens/s, with graphs {h100['graphs']:,.0f}",
            f"flattened, flash-attn 2: {against('H100', 'flattened')}",
            "padded: out of memory",
        ),
        (
            "loss, vocabulary 151,936, H100",
            f"{ours_ms:,.0f} ms, {ours_gib} GiB",
            f"Liger: {times(liger_ms / ours_ms)}",
            f"`F.cross_entropy`: {torch_gib} GiB",
        ),
        (
            "quickstart's model, CPU, fp32",
            f"{plain:,.0f} tokens/s, compiled {compiled:,.0f}",
            on_cpu("padded by length"),
            f"{on_cpu('padded')}; {on_cpu('flattened')}",
        ),
        (
            "attention, 16 and 512 documents, CPU",
            " and ".join(f"{1_000 * one.ours:.0f} ms" for one in loop),
            "SDPA in a loop: " + " and ".join(times(one.ratio or 0) for one in loop),
            "dense mask: " + " and ".join(times(one.ratio or 0) for one in dense),
        ),
        (
            "loss, vocabulary 151,936, CPU, bf16",
            f"{loss.ours:.0f} s, {memory.ours:.0f} MiB",
            f"fastest peer: {times(loss.ratio or 0)}",
            f"`F.cross_entropy`: {memory.peer:,.0f} MiB",
        ),
        (
            "8 answers to one prompt, CPU",
            f"{shared.ours:.2f} CPU s",
            f"without `share_prefixes`: {times(shared.ratio or 0)}",
            "",
        ),
        (
            "planning 1,000,000 documents",
            f"{plan.ours:.3f} s",
            f"TRL's best-fit decreasing: {times(plan.ratio or 0)}",
            "",
        ),
        (
            "collating a pack with labels",
            f"{chat.ours:.0f} us",
            f"transformers' flattening: {times(chat.ratio or 0)}",
            "",
        ),
    ]
    table = ["| what | ours | the fair peer | others |", "|---|---|---|---|"]
    return "\n".join(table + [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines[:rows]])


def few_speed() -> str:
    """Make the README's table, with the days and the processor of its rows."""
    return f"{speed(rows=4)}\n\n{about()}"


def all_speed() -> str:
    """Make the page's table, which has rows that the README leaves out."""
    return speed(rows=100)


def about() -> str:
    """Say when and where the rows were measured."""
    found = dates()
    return (
        f"Measured {found['gpu']} on GPUs ([rows](benchmarks/GPU.md)) and {found['cpu']} on a CPU "
        f"({found['machine']}; [rows](benchmarks/RESULTS.md)). 2x is twice as fast."
    )


@dataclass(frozen=True, slots=True)
class Shortcoming:
    """Rows that fall short for one reason, and how the README says so."""

    benchmark: str  # or several, with spaces between
    pattern: str  # of the names of its rows
    text: str  # {worst} and {best} are the ratios of its rows


SHORTCOMINGS = (
    Shortcoming(
        "import_time",
        "CPU of the quickstart to its first",
        "The quickstart's first batch: {worst} its imports.",
    ),
    Shortcoming("throughput_overhead", "", "The monitor: {worst} to {best} Lightning's own; {most} a pack."),
    Shortcoming("reading", "tokens tokenised", "Tokenising files: {worst} the tokenizer itself."),
    Shortcoming(
        "loss",
        "log-probs",
        "Log-probabilities, CPU: {worst} to {best} the fastest loss.",
    ),
    Shortcoming("loss", "DPO", "DPO, CPU: {worst} whole logits, in less memory."),
    Shortcoming(
        "expert_bytes",
        "tokens sent to experts / whole experts",
        "Experts over two ranks: {worst} the bytes of tensor ranks.",
    ),
    Shortcoming("loss_curves", "", "bf16 after 100 steps: {worst} as near to fp32's loss as torch's."),
    Shortcoming("host_time host_flash", "", "Steps of 64 tokens: {worst} to {best} plain Lightning."),
    Shortcoming(
        "attention",
        "128 nearly equal",
        "Attention, CPU, nearly equal lengths: {worst} to {best} padded rows.",
    ),
)


def falls_short(benchmark: str, one: Result) -> float | None:
    """Return a row's share of its peer where that has to be told, else None."""
    share = one.ratio
    if "of the tokenizer's own" in one.what:
        share = one.ours
    elif "times plain Lightning" in one.what:
        share = 1 / one.ours
    if share is None or share >= (WORSE if one.met else MISSED):
        return None
    return share


def shortcomings() -> list[tuple[str, Result, float]]:
    """List every row that is clearly worse than its peer, the worst first."""
    rows = [
        (name, one, share)
        for name, part in results().items()
        for one in part
        if (share := falls_short(name, one)) is not None
    ]
    return sorted(rows, key=lambda entry: entry[2])


def short() -> str:
    """Make the README's list of shortcomings; every row of the tables has a line that speaks of it."""
    groups: dict[Shortcoming, list[tuple[Result, float]]] = {}
    for name, one, share in shortcomings():
        group = next(
            (g for g in SHORTCOMINGS if name in g.benchmark.split() and one.what.startswith(g.pattern)), None
        )
        if group is None:
            raise ValueError(
                f"{name}: {one.what} is {share:.2f} of its peer; SHORTCOMINGS has no line for it."
            )
        groups.setdefault(group, []).append((one, share))

    lines = []
    for group, rows in groups.items():
        shares = [share for _, share in rows]
        most = f"{max(one.ours for one, _ in rows):.0f} us"
        text = group.text.format(worst=times(min(shares)), best=times(max(shares)), most=most)
        lines.append((min(shares), text))
    return "\n".join(f"- {text}" for _, text in sorted(gpu_short()) + sorted(lines))


def gpu_short() -> list[tuple[float, str]]:
    """Return what falls short in GPU.md, each with its share of the peer or of the goal."""
    lines = []
    for machine in ("H200", "H100"):
        rates = one_b(machine)
        share = rates["packs"] / rates["flattened"]
        if share < MISSED:
            graphs = times(rates["graphs"] / rates["flattened"])
            text = (
                f"1B on an {machine}: {times(share)} flattened rows with flash-attn 2 ({graphs} with graphs)."
            )
            lines.append((share, text))
    ours_ms, liger_ms = (gpu_number("H100", LIGER, "ms", nth) for nth in (0, 1))
    if liger_ms / ours_ms < MISSED:
        text = f"Loss on an H100, before its Triton kernels: {times(liger_ms / ours_ms)} Liger."
        lines.append((liger_ms / ours_ms, text))
    small, goal = (gpu_number("H100", SMALL, unit) for unit in ("with graphs", "missed"))
    if small / goal < MISSED:
        text = f"125M on an H100, with graphs: {small:,.0f} tokens/s, {times(small / goal)} the goal."
        lines.append((small / goal, text))
    return lines


def all_short() -> str:
    """Make the page's table: every row that is clearly worse than its peer, none left out."""
    lines = ["| benchmark | what | precision | share of the peer | goal | met |", "|---|---|---|---|---|---|"]
    for name, one, share in shortcomings():
        met = "yes" if one.met else "no"
        lines.append(f"| {name} | `{one.what}` | {one.precision} | {share:.2f} | {one.goal} | {met} |")
    return "\n".join(lines)


def trained() -> str:
    """Show the table that the quickstart printed, with its day and processor."""
    file = HERE / "quickstart.json"
    if not file.exists():  # not measured since its format changed
        return ""
    found = json.loads(file.read_text())
    return (
        f"{found['steps']} steps on {found['machine']}, {found['date']}, torch {found['torch']}, "
        f"{found['precision']}, {found['minutes']:.1f} minutes:\n\n"
        f"```\n{found['table']}\n```"
    )


def setup() -> str:
    """Fold the names that pages use, from the first page, so that each page runs by itself."""
    text = (ROOT / "docs" / "index.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    # two blank lines, as the formatter of code in pages wants them
    code = "\n\n".join(block for block in blocks if "trainer" not in block)
    return f"{_FOLDED}\n\n```python\n{code}```\n\n</details>"


def setup_chats() -> str:
    """Fold the same, with conversations and a tokenizer that need no download."""
    return setup().replace("```\n\n</details>", f"\n{_CHATS}```\n\n</details>")


_FOLDED = '<details markdown="1"><summary>Setup for this page</summary>'
_CHATS = """from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# bytes as tokens; with a model of yours: AutoTokenizer.from_pretrained(...)
signs = ["<|start|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
ids = {sign: number for number, sign in enumerate(signs)}
byte_level = Tokenizer(models.BPE(vocab=ids, merges=[]))
byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
byte_level.decoder = decoders.ByteLevel()
byte_level.add_special_tokens(["<|start|>", "<|end|>"])
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=byte_level, eos_token="<|end|>", pad_token="<|end|>"
)
tokenizer.chat_template = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\\n{{ m['content'] }}<|end|>\\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\\n{% endif %}"
)

talk = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello there"},
]
Path("chats.jsonl").write_text((json.dumps({"messages": talk}) + "\\n") * 8)
"""
REGIONS: dict[str, Callable[[], str]] = {
    "setup": setup,
    "setup_chats": setup_chats,
    "headline": headline,
    "fair": fair,
    "verdicts": verdicts,
    "speed": few_speed,
    "all_speed": all_speed,
    "short": short,
    "all_short": all_short,
    "trained": trained,
    "long_contexts": fits.long_contexts,
    "capacities": fits.capacities,
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# A number with a unit of speed, size or share, or a count of things that were tried. Numbers of code and of
# settings are no figures.
FIGURE = re.compile(
    r"(?<![\w.,-])\d[\d,.]*(?: ?x\b| times\b| ?%| tokens/s| TFLOP/s| [KMG]iB| [kMG]B| bytes| launches| ms\b"
    r"| us\b| s\b| seconds\b| minutes\b| families| layouts| cases| of \d[\d,]*)"
)
COMPUTED = "computed, the same on every machine"
EXAMPLE = "an example of an output or of a setting"
CARD = "the memory of a card"
ROUGH = "a rough time that depends on the machine, told as such"


def _ratio(benchmark: str, name: str, precision: str | None = None) -> Callable[[], float]:
    return lambda: row(benchmark, name, precision).ratio or 0.0


def _ours(benchmark: str, name: str, unit: float = 1.0) -> Callable[[], float]:
    return lambda: row(benchmark, name).ours / unit


def _peers(benchmark: str, name: str, unit: float = 1.0) -> Callable[[], float]:
    return lambda: (row(benchmark, name).peer or 0.0) / unit


def _gpu_says(figure: str) -> Callable[[], str]:
    """Find a figure, such as ``11 of 17``, in the sentences of GPU.md; "" if it is not there."""
    pattern = rf"(?<![\d,.]){re.escape(figure)}"
    return lambda: figure if re.search(pattern, (HERE / "GPU.md").read_text()) else ""


def agrees(figure: str, value: float | str) -> bool:
    """Return whether a figure in a sentence is the value, rounded to its digits, or the same text."""
    if isinstance(value, str):
        return figure == value
    number = re.match(r"[\d,.]*\d", figure)
    assert number is not None, figure
    digits = len(number[0].partition(".")[2])
    return abs(float(number[0].replace(",", "")) - value) <= 0.501 * 10.0**-digits


# page -> figure -> the value that its row gives, or why no row has it
CITED: dict[str, dict[str, Callable[[], float | str] | str]] = {
    "README.md": {
        "70 %": COMPUTED + " (docs/concepts/leaks.md, tests/test_readme.py)",
        "44 families": _gpu_says("44 families"),
        "11 of 17": _gpu_says("11 of 17"),
        "24 GB": CARD,
        "20 bytes": "counted by lightning_thd.memory (docs/guides/memory.md)",
    },
    "docs/coming-from.md": {"0.1 s": ROUGH + " (packing, plan 1,000,000)"},
    "docs/concepts/leaks.md": {"3.6 times": COMPUTED + " (the block of docs/concepts/mfu.md)"},
    "docs/concepts/mfu.md": {
        "12 x": COMPUTED,
        "108 families": _ours("flops", "families in the table of FLOPs"),
        "1.14 times": COMPUTED,
        "1.6 times": COMPUTED,
        "3.6 times": COMPUTED,
    },
    "docs/guides/capacity.md": {"141 GB": CARD, "10 bytes": COMPUTED},
    "docs/guides/chat.md": {"5 %": COMPUTED + " (tests/packing/test_media.py)"},
    "docs/guides/cuda-graphs.md": {
        "0.7 ms": ROUGH,
        "24 times": EXAMPLE,
        "14.5 GB": _gpu_says("14.5 GB"),
        "512 MB": EXAMPLE,
    },
    "docs/guides/data.md": {"1,000 times": EXAMPLE},
    "docs/guides/experts.md": {
        "8 of 128": EXAMPLE,
        "39 kB": _ours("expert_bytes", "tokens sent to experts / weights gathered", 1e3),
        "228 kB": _peers("expert_bytes", "tokens sent to experts / weights gathered", 1e3),
        "29 kB": _peers("expert_bytes", "tokens sent to experts / whole experts on tensor ranks", 1e3),
        "70 families": ROUGH,
    },
    "docs/guides/fp8.md": {"97 %": "seen once on the H200 of GPU.md"},
    "docs/guides/look.md": {"90 %": EXAMPLE},
    "docs/guides/prefixes.md": dict.fromkeys(
        ("99 %", "2.3 times", "1.6 times"), "counted by python -m benchmarks.prefixes --keys"
    ),
    "docs/guides/parallelism.md": {
        "11 of 17": _gpu_says("11 of 17"),
        "2 x": COMPUTED,
        "1.01 times": _ours("dynamic_cp", "slowest ranks / even share (at least 1.00), long, 512"),
        "1.17 times": _ours("dynamic_cp", "slowest ranks / even share (at least 1.14), long, 512"),
        "1.14 times": COMPUTED + " (in the name of the row before)",
        "1.06 times": _ours("dynamic_cp", "slowest ranks / even share (at least 1.03), long, 64"),
    },
    "docs/guides/memory.md": {
        "141 GB": CARD,
        "92 of 100": COMPUTED,
        "39 cases": "tests/test_memory.py",
        "5 x": COMPUTED,
        "4 bytes": COMPUTED,
        "26 GB": lambda: 131_072 * 200_832 / 1e9,  # slots x the bytes of a slot in the table above it
        "4 GB": COMPUTED,
        "34 GB": lambda: 131_072 * 2 * 4_096 * 32 / 1e9,  # slots x 2 H x layers
    },
    "docs/guides/monitor.md": {"24 GB": CARD},
    "docs/guides/pipelines.md": {
        "11 %": lambda: 100 * (2 - 1) / (8 + 2 - 1),  # (p - 1) / (v n + p - 1)
        "6 %": lambda: 100 * (2 - 1) / (2 * 8 + 2 - 1),
        "1.09 times": _ratio("pipeline_engines", "step of 8 packs, long, 1f1b"),
        "1.11 times": "an earlier run of the same benchmark, 2026-11-29",
        "4 GiB": COMPUTED,
    },
    "docs/guides/speed.md": {
        "1.06x": _ratio("attention", "16 random documents, forward and backward", "bf16"),
        "3.1x": _ratio("attention", "512 random documents, forward and backward", "bf16"),
        "8 bytes": COMPUTED,
        "10 bytes": _ours("loss_counts", "traffic of a logit, scalar loss, 32"),
        "18 bytes": _ours("loss_counts", "traffic of a logit, distillation, kl"),
        "410 bytes": _peers("loss_counts", "traffic of a logit, distillation, jsd"),
        "115 launches": _ours("loss_counts", "launches, scalar loss, 32"),
        "371 launches": _ours("loss_counts", "launches, distillation, jsd"),
    },
    "docs/guides/streams.md": {
        "12 ms": _ours("streams", "plan, 4096 ranks x 16"),
        **dict.fromkeys(("60 bytes", "8 bytes", "180 bytes"), COMPUTED),
    },
    "docs/index.md": {"4 minutes": ROUGH},
    "docs/support.md": {"4 %": "seen once on the H200 of GPU.md", "11 of 17": _gpu_says("11 of 17")},
}


def sentences(text: str) -> str:
    """Return a page without its code, its marked regions and its comments, in one line."""
    words = re.sub(r"```.*?```|`[^`\n]*`|<!--.*?-->", "", _REGION.sub("", text), flags=re.S)
    return re.sub(r"\s+", " ", words)


def fill(text: str) -> str:
    """Write every marked region of a page again."""
    return _REGION.sub(lambda found: f"{found[1]}{REGIONS[found[2]]()}\n{found[3]}", text)


def main() -> int:
    """Write the regions of all pages; the number of pages that changed."""
    changed = 0
    for page in PAGES:
        text = page.read_text()
        new = fill(text)
        if new != text:
            page.write_text(new)
            changed += 1
            print(page.relative_to(ROOT))
    return changed


if __name__ == "__main__":
    main()
