"""Tiny models of every family of transformers: packs through "thd" against stock eager, each document alone.

``python -m benchmarks.families`` writes ``benchmarks/FAMILIES.md``, a line a family: exact; refused, with the
reason; wrong, with the error; crash; or could not be built. ``--only llama,gpt2`` prints instead of writing,
``--kinds causal,image_text`` chooses tables, ``--vary 7`` draws other sizes, ``--changed`` changes configs
after construction. Families run in groups, a process each, so that one that dies takes no other along.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.family_sizes import Sizes, draw
from benchmarks.family_table import LENGTHS, PAD_TO, TOLERANCE, Line, read_table, table, updated
from benchmarks.tiny_configs import END, MASK, VOCAB, known, tiny
from lightning_thd import THDBatch

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image_text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "encoder": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}


def families(kind: str) -> dict[str, str]:
    """Model types of one kind and their model classes, as the installed transformers lists them."""
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, KINDS[kind])
    return {name: cls if isinstance(cls, str) else cls[0] for name, cls in names.items()}


def build(family: str, model_class: str, attention: Any, overrides: dict[str, Any] | None = None) -> Any:
    """Build a tiny model with random weights, the same for every attention (a name, or a dict of them)."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = tiny(CONFIG_MAPPING[family], known(CONFIG_MAPPING[family], overrides or {}))
    cls = getattr(transformers, model_class)
    if not isinstance(config, cls.config_class):
        config = next((x for x in vars(config).values() if isinstance(x, cls.config_class)), config)
    if (hasattr(config, "is_decoder") and ("CausalLM" in model_class)) or "LMHead" in model_class:
        config.is_decoder = True
    for part in (config, config.get_text_config()):
        part.use_cache = False  # reference and packs alike: no head here generates
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():  # biases, norms, gates and sinks off their initial zeros and ones
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def samples(kind: str = "causal", seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Documents of ordinary tokens; where a head may look for an end, with one."""
    generator = torch.Generator().manual_seed(seed)
    docs = [torch.randint(8, VOCAB - 8, (n,), generator=generator) for n in lengths]
    for ids in docs if kind == "sequence" else ():
        ids[-1] = END
    for ids in docs if kind == "encoder" else ():  # a share that differs from one to the next
        ids[1 : len(ids) // 2 : 2] = MASK
    return docs


def _loss(logits: Sequence[Tensor], ids: Sequence[Tensor]) -> Tensor:
    total: Tensor = sum(
        (
            cross_entropy(x.float(), y % x.shape[-1], reduction="sum")
            for x, y in zip(logits, ids, strict=True)
        ),
        torch.zeros(()),
    )
    return total


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _alone(model: Any, docs: Sequence[Tensor], kind: str) -> list[Tensor]:
    arguments = {} if kind in ("encoder", "sequence", "token") else {"use_cache": False}
    rows = {}
    for i in sorted(range(len(docs)), key=lambda i: len(docs[i])):  # a dynamic rope remembers longer ones
        rows[i] = model(input_ids=docs[i][None], **arguments).logits
    return [rows[i] if kind == "sequence" else rows[i][0] for i in range(len(docs))]


def _packed(model: Any, docs: Sequence[Tensor], kind: str, pad_to: int) -> list[Tensor]:
    batch = THDBatch.collate([{"input_ids": ids} for ids in docs], pad_to=pad_to)
    logits = model(**batch.hf_kwargs()).logits
    return [logits[i][None] for i in range(len(docs))] if kind == "sequence" else list(batch.unpack(logits))


def _error(got: Tensor, want: Tensor, scale: float) -> float:
    return float((got - want).abs().max() / max(scale, 1e-30))


def change(model: Any) -> None:
    """Change what eager attention reads from a config in every call: the window, kinds of layers, chunks."""
    for config in {id(x.config): x.config for x in model.modules() if hasattr(x, "config")}.values():
        for name, value in (("sliding_window", 3), ("attention_chunk_size", 3), ("local_attention", 6)):
            if getattr(config, name, None) is not None:
                setattr(config, name, value)
        kinds = getattr(config, "layer_types", None)
        if kinds and len({*kinds}) > 1:  # the model makes a mask for each
            with suppress(AttributeError):  # some count them from other values
                config.layer_types = [*reversed(kinds)]


def compare(
    kind: str, family: str, model_class: str, sizes: Sizes | None = None, *, changed: bool = False
) -> tuple[str, str]:
    """Give the verdict on one family and what there is to say about it."""
    overrides, lengths, pad_to = {}, LENGTHS, PAD_TO
    if sizes is not None:
        overrides, lengths, pad_to = sizes.overrides, sizes.lengths, sum(sizes.lengths) + sizes.pad
    try:
        stock = build(family, model_class, "eager", overrides)
    except Exception as error:
        return "not built", _brief(error)
    if changed:
        change(stock)
    docs = samples(kind, lengths=lengths)
    try:
        want = _alone(stock, docs, kind)
        targets = [ids[: x.shape[0]] for ids, x in zip(docs, want, strict=True)]
        _loss(want, targets).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return "no reference", _brief(error)
    try:
        ours = build(family, model_class, "thd", overrides)
        ours.load_state_dict(stock.state_dict())
        if changed:
            change(ours)
        got = _packed(ours, docs, kind, pad_to)
        _loss(got, targets).backward()  # type: ignore[no-untyped-call]
    except ValueError as error:
        if "thd" in traceback.format_exc().split("Traceback")[-1] or "pack" in str(error):
            return "refused", _brief(error)
        return "crash", _brief(error)
    except Exception as error:
        return "crash", _brief(error)
    return _judge(got, want, _gradients(ours), _gradients(stock))


def _judge(
    got: Sequence[Tensor], want: Sequence[Tensor], ours: dict[str, Tensor], theirs: dict[str, Tensor]
) -> tuple[str, str]:
    scale = max(float(x.detach().abs().max()) for x in want)
    error = max(_error(a.detach(), b.detach(), scale) for a, b in zip(got, want, strict=True))
    if not error <= TOLERANCE:
        return "wrong", f"logits {error:.1e}"
    if ours.keys() != theirs.keys():
        return "wrong", f"gradients of {sorted(ours.keys() ^ theirs.keys())[:3]}"
    largest = max(float(g.abs().max()) for g in theirs.values())
    if not all(bool(g.isfinite().all()) for g in theirs.values()):
        return "no reference", "stock gradients are not finite"
    errors = {
        name: _error(ours[name], g, max(float(g.abs().max()), 1e-3 * largest)) for name, g in theirs.items()
    }
    bad = {name: e for name, e in errors.items() if not e <= 10 * TOLERANCE}
    if bad:
        worst = max(bad, key=lambda name: bad[name] if bad[name] == bad[name] else 1e9)
        return "wrong", f"{len(bad)} of {len(errors)} gradients, {bad[worst]:.1e} in {worst}"
    return "exact", f"{error:.0e}"


def _brief(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    place = "" if "lightning_thd" in where.filename else f" ({Path(where.filename).name}:{where.lineno})"
    return f"{type(error).__name__}: {text[:300]}{place}"


def _work(kind: str, names: Sequence[str], vary: int | None, changed: bool) -> None:
    """Run families in this process, a JSON line each."""
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    table = families(kind)
    for name in names:
        sizes = None if vary is None else draw(vary, name)
        verdict, detail = compare(kind, name, table[name], sizes, changed=changed)
        if sizes is not None and verdict in ("wrong", "crash"):
            detail += f" at {sizes}"
        line = Line(kind=kind, family=name, model=table[name], verdict=verdict, detail=detail)
        print("LINE " + json.dumps(asdict(line)), flush=True)


def sweep(
    kind: str,
    names: Sequence[str],
    *,
    group: int = 12,
    timeout_s: int = 1200,
    vary: int | None = None,
    changed: bool = False,
) -> Iterator[Line]:
    """Run families in processes of ``group``; the one a process dies in is a crash, the rest goes on."""
    waiting = list(names)
    table = families(kind)
    while waiting:
        now = waiting[:group]
        command = [sys.executable, "-m", "benchmarks.families", "--worker", kind, "--only", ",".join(now)]
        command += [] if vary is None else ["--vary", str(vary)]
        command += ["--changed"] if changed else []
        try:
            out = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            ).stdout
            why = "the process died"
        except subprocess.TimeoutExpired as late:
            out = (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else (late.stdout or "")
            why = f"no answer within {timeout_s} s"
        lines = [Line(**json.loads(x[5:])) for x in out.splitlines() if x.startswith("LINE ")]
        yield from lines
        waiting = waiting[len(lines) :]
        if len(lines) < len(now):
            lost = waiting.pop(0)
            yield Line(kind=kind, family=lost, model=table[lost], verdict="crash", detail=why)


def turn(names: Sequence[str], number: int, *, of: int) -> list[str]:
    """Take every ``of``-th family, beginning at ``number``: that many turns see them all."""
    return [name for i, name in enumerate(names) if i % of == number % of]


def main(argv: list[str] | None = None) -> None:
    """Run the sweep and write or print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="of " + ", ".join(KINDS))
    parser.add_argument("--only", default="", help="families, by model type; prints and writes nothing")
    parser.add_argument("--turn", default="", help="3/10: every tenth family, from the third; writes nothing")
    parser.add_argument(
        "--vary", type=int, help="a seed: other sizes of models and documents; writes nothing"
    )
    parser.add_argument(
        "--changed", action="store_true", help="change configs after models were built; writes nothing"
    )
    parser.add_argument(
        "--update", action="store_true", help="with --only: write these families' lines into the table"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("FAMILIES.md"))
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    only = [name for name in args.only.split(",") if name]
    if args.worker:
        _work(args.worker, only, args.vary, args.changed)
        return
    lines: list[Line] = []
    for kind in args.kinds.split(","):
        names = [name for name in families(kind) if not only or name in only]
        if args.turn:
            number, of = map(int, args.turn.split("/"))
            names = turn(names, number, of=of)
        for line in sweep(kind, names, vary=args.vary, changed=args.changed):
            lines.append(line)
            print(f"{line.kind:10} {line.family:28} {line.verdict:12} {line.detail}", flush=True)
    print(dict(Counter(f"{line.kind} {line.verdict}" for line in lines)))
    if args.update:
        old = read_table(args.out.read_text(encoding="utf-8"))
        args.out.write_text(table(updated(old, lines)), encoding="utf-8")
    elif not only and not args.turn and args.vary is None and not args.changed:
        args.out.write_text(table(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
