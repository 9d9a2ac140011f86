"""RESULTS.md and the tables of patches and private names -> pages that show them."""

import re
import sys
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "RESULTS.md"
ROOT = RESULTS.parent.parent
# Pages of the site that show a file of the repository. There, each page is a link.
SHOWN = {
    "benchmarks/FAMILIES.md": "families.md",
    "benchmarks/GPU.md": "gpu.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
    "benchmarks/TRUST.md": "trust.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
ONLY_A_LINK = re.compile(r"\s*In the repository, read \[([\w./]+)\]\(\S+\)\.\s*")

# A benchmark and the beginning of a row: these lines open the page.
HEADLINES = (
    ("end_to_end", "training, ours, fp32 / flattened"),
    ("end_to_end", "training, ours, compiled, bf16 / padded, bf16"),
    ("attention", "16 random documents, forward and backward, sdpa"),
    ("attention", "512 random documents, forward and backward, sdpa"),
    ("attention", "128 nearly equal documents, forward and backward"),
    ("loss", "largest error of a log-probability"),
    ("packing", "plan 1,000,000, long@8k, TRL"),
    ("loading", "collate chat 8k, flattening |"),
    ("reading", "CPU to the first batch, JSONL"),
    ("import_time", "CPU of the import beyond lightning's"),
)
# What each benchmark measures; others keep their name.
TOPICS = {
    "end_to_end": "Training, tokens a second",
    "attention": "Attention",
    "attention_kernels": "Attention: errors",
    "loss": "Loss and log-probabilities",
    "loss_curves": "Loss curves in bf16",
    "prefixes": "Shared prefixes",
    "profile_step": "Where a step's time goes",
    "import_time": "Imports",
    "balance": "Balance of ranks",
    "host_time": "Host time of a step",
    "throughput_overhead": "Cost of the monitor",
    "reading": "Reading files",
    "loading": "Collating packs",
    "streams": "Streams",
    "packing": "Planning packs",
    "segments": "Offsets of segments",
    "leaks": "Leaks between sequences",
    "fp8": "FP8",
    "flops": "FLOPs of families",
    "strategy_overhead": "Cost of the strategies",
    "context_balance": "Balance of context-parallel ranks",
    "dynamic_cp": "Dynamic context parallelism",
    "pipeline": "Pipelines",
    "pipeline_engines": "Pipelines beside torch's engine",
    "cuda_graph_plan": "Choice of CUDA graphs",
}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Show files in place of links to them, and put generated tables on two pages."""
    source = f"docs/{page.file.src_uri}"
    only_a_link = ONLY_A_LINK.fullmatch(markdown)
    if only_a_link:
        source = only_a_link[1]
        markdown = (ROOT / source).read_text()
    markdown = within_site(markdown, source, page.file.src_uri)
    if page.file.src_uri == "changes.md":
        return f"{markdown}\n{replaced()}"
    if page.file.src_uri == "benchmarks.md":
        return f"{markdown}\n\n{folded(RESULTS.read_text().partition(chr(10))[2])}"
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Keep options and hyphenated names of inline code on one line."""
    return re.sub(r"(?<!</span>)<code>([^<]*)</code>", _whole, html)


def _whole(code: re.Match[str]) -> str:
    words = re.sub(
        r"[\w-]*-[\w-]+",
        lambda word: (
            f'<span class="whole">{word[0]}</span>' if len(word[0]) <= 24 else word[0]
        ),
        code[1],
    )
    return f"<code>{words}</code>"


def within_site(markdown: str, source: str, page: str) -> str:
    """Point the links of a file at pages of the site; keep only the words of others.

    Args:
        markdown: the text of the file.
        source: its path in the repository.
        page: the path below ``docs`` of the page that shows it.
    """
    here = dirname(page) or "."

    def changed(link: re.Match[str]) -> str:
        words, target, anchor = link.groups("")
        path = normpath(f"{dirname(source) or '.'}/{target}")
        if path in SHOWN:
            return f"[{words}]({relpath(SHOWN[path], here)}{anchor})"
        if not path.startswith("docs/"):
            return words
        return f"[{words}]({relpath(path.removeprefix('docs/'), here)}{anchor})"

    link = r"(?<!!)\[([^]\n]+)\]\((?!\w+:)([\w./-]+)(#[\w-]*)?\)"
    return re.sub(link, changed, markdown)


def replaced() -> str:
    """List the replaced functions, and what stops if a private name is gone."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from lightning_thd._patches import PATCHES
    from lightning_thd._private import PRIVATE

    lines = [
        "## Replaced functions",
        "",
        "| row | what | where and why |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {patch.what} | `lightning_thd/{patch.where}` |"
        for name, patch in PATCHES.items()
    ]
    lines += [
        "",
        "## Private names",
        "",
        "Another package may move these names in any release. Each is taken when the",
        "feature in its row is used. If it is gone, that feature stops with an error",
        "that says so, and everything else goes on (`tests/test_private.py`).",
        "",
        "| name | used in | checked with | what stops without it |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | `lightning_thd/{row.place}` | {row.checked} | {row.feature} |"
        for name, row in PRIVATE.items()
    ]
    return "\n".join(lines)


def folded(markdown: str) -> str:
    """Replace the long table by ten rows and a folded table for each benchmark."""
    head, before, rows, after = _table(markdown)
    shown = [_row(rows, f"| {name} | {what}") for name, what in HEADLINES]
    parts = [before, "\n".join([*head, *shown]), "", "## All results, by topic", ""]
    for name in dict.fromkeys(row.split(" | ")[0].removeprefix("| ") for row in rows):
        own = [row for row in rows if row.startswith(f"| {name} | ")]
        met = sum(row.endswith("| yes |") for row in own)
        parts.append(
            f'??? note "{TOPICS.get(name, name)}: {met} of {len(own)} goals are met"'
        )
        parts += ["", *(f"    {line}" for line in [*head, *own]), ""]
    return "\n".join([*parts, after])


def _table(markdown: str) -> tuple[list[str], str, list[str], str]:
    """Return the head of the table, the text before it, its rows and the text after."""
    found = re.search(r"^\| benchmark \| .*\n\| --- .*\n((?:\|.*\n)+)", markdown, re.M)
    if found is None:
        raise ValueError(
            "benchmarks/RESULTS.md has no table that begins with '| benchmark |'."
        )
    head, rows = found[0].splitlines()[:2], found[1].splitlines()
    return head, markdown[: found.start()], rows, markdown[found.end() :]


def _row(rows: list[str], start: str) -> str:
    row = next((row for row in rows if row.startswith(start)), None)
    if row is None:
        raise ValueError(
            f"benchmarks/RESULTS.md has no row {start!r}; choose another in hooks.py."
        )
    return row
