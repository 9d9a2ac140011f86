"""Verdicts on families -> the Markdown table of ``benchmarks/FAMILIES.md``, and back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

# A single token, more than one window and one chunk (8) of the tiny configs, and neighbours of both.
LENGTHS = (7, 1, 21, 9)
PAD_TO = 48
TOLERANCE = 2e-5  # fp32, of the largest logit; gradients, sums of many more terms, ten times that
VERDICTS = ("exact", "refused", "wrong", "crash", "no reference", "not built")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What became of one family."""

    kind: str
    family: str
    model: str
    verdict: str
    detail: str = ""


def table(lines: Sequence[Line]) -> str:
    """Lay the lines out as Markdown: counts, then every family that is not exact with its reason."""
    import transformers

    kinds = list(dict.fromkeys(line.kind for line in lines))
    counts = Counter((line.kind, line.verdict) for line in lines)
    text = [
        "# Families",
        "",
        f"Written by `python -m benchmarks.families`, transformers {transformers.__version__}, torch "
        f"{torch.__version__}. Tiny models from configs, random weights, fp32: packs of {LENGTHS} tokens "
        f'and a trailing pad to {PAD_TO} through "thd" against stock eager attention, one document at a '
        f"time. Exact: logits within {TOLERANCE:.0e} and gradients within {10 * TOLERANCE:.0e}. No "
        "reference: stock eager does not run on these documents from this tiny config. Not built: a package "
        "or a config is missing.",
        "",
        "| table | " + " | ".join(VERDICTS) + " |",
        "| --- |" + " --- |" * len(VERDICTS),
        *(f"| {kind} | " + " | ".join(str(counts[kind, v]) for v in VERDICTS) + " |" for kind in kinds),
    ]
    for kind in kinds:
        own = [line for line in lines if line.kind == kind]
        exact = ", ".join(line.family for line in own if line.verdict == "exact")
        text += [
            "",
            f"## {kind}",
            "",
            f"Exact: {exact}.",
            "",
            "| family | verdict | why |",
            "| --- | --- | --- |",
        ]
        text += [
            f"| {line.family} | {line.verdict} | {_cell(line.detail)} |"
            for line in own
            if line.verdict != "exact"
        ]
    return "\n".join(text) + "\n"


def _cell(detail: str) -> str:
    """Write a reason without the signs that Markdown reads as a column or as a link."""
    return detail.replace("|", "/").replace("][", "]\\[")


def read_table(text: str) -> list[Line]:
    """Read the lines of a table again; it names no model classes."""
    return [line for section in text.split("\n## ")[1:] for line in _section(section)]


def _section(text: str) -> Iterator[Line]:
    kind, rest = text.split("\n", 1)
    exact = re.search(r"^Exact: (.*)\.$", rest, re.MULTILINE)
    for family in exact[1].split(", ") if exact is not None and exact[1] else ():
        yield Line(kind=kind, family=family, model="", verdict="exact")
    for family, verdict, detail in re.findall(r"^\| (\S+) \| ([a-z ]+) \| (.*) \|$", rest, re.MULTILINE):
        if verdict in VERDICTS:
            yield Line(kind=kind, family=family, model="", verdict=verdict, detail=detail)


def updated(old: Sequence[Line], new: Sequence[Line]) -> list[Line]:
    """Replace the lines of some families, in the order of kinds and names."""
    lines = {(line.kind, line.family): line for line in old} | {(x.kind, x.family): x for x in new}
    kinds = list(dict.fromkeys(line.kind for line in [*old, *new]))
    return sorted(lines.values(), key=lambda line: (kinds.index(line.kind), line.family))
