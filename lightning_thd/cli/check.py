"""``lightning-thd check``: a model or its config -> whether the sequences of a pack see each other."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from lightning_thd._imports import require
from lightning_thd.cli.arguments import Parser, refuse_unreachable, whole
from lightning_thd.models.probe import check_packing


def check(arguments: Sequence[str]) -> None:
    """Print the leak probe's report; exit with 1 if one of its checks fails."""
    parser = Parser(
        "lightning-thd check",
        description="Build a model from its config with random weights, run packs through it, and test "
        "whether any sequence sees another.",
        epilog="example: lightning-thd check config.json --layers 2",
    )
    parser.add_argument("model", help="a config.json, a folder with one, or a model's name")
    parser.add_argument("--attention", default="thd", help="attn_implementation to check (default: thd)")
    parser.add_argument("--layers", type=whole(1), help="build only this many of the config's layers")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(list(arguments))

    model = load_model(options.model, options.attention, options.layers)
    report = check_packing(model, raise_on_leak=False)
    text = str(report)
    if options.json:
        text = json.dumps({**asdict(report), "ok": report.ok}, default=str)
    sys.stdout.write(f"{text}\n")
    if not report.ok:
        sys.exit(1)


def load_model(name: str, attention: str, layers: int | None) -> Any:
    """Build a causal language model with random weights from a config, with all or ``layers`` layers."""
    refuse_unreachable(name)
    require("transformers", feature="lightning-thd check")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(name)
    if layers is not None:
        text = config.get_text_config()
        if layers > text.num_hidden_layers:
            raise ValueError(
                f"--layers {layers}, but {name} has {text.num_hidden_layers} layers. Pass at most as many."
            )
        text.num_hidden_layers = layers
        if vars(text).get("layer_types"):  # other configs compute it from the number of layers
            text.layer_types = text.layer_types[:layers]
        if getattr(text, "num_kv_shared_layers", 0):  # the last layers of Gemma use earlier layers' keys
            text.num_kv_shared_layers = 0
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
