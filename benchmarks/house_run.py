"""Runs inside a checkout and prints JSON: what the package changes in others, inherits and calls.

``benchmarks/house.py`` starts it as a process of its own for each checkout, by its path, with the checkout
first on PYTHONPATH. It therefore uses nothing of this folder and only public names of the package.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import logging
import pkgutil
import re
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

FOREIGN = ("torch", "lightning", "transformers", "accelerate", "trl", "torchmetrics", "peft")
# Steps before the first are left out because caches fill in them.
FIRST_STEP, LAST_STEP = 20, 40


# ---- what the package changes in others


def is_ours(value: Any, root: str) -> bool:
    """Return whether a value is a function, a class or an object of the package."""
    value = inspect.unwrap(value) if isinstance(value, FunctionType) and _code_is_ours(value, root) else value
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if isinstance(value, property):
        return is_ours(value.fget, root)
    if isinstance(value, FunctionType):
        return _code_is_ours(value, root)
    if isinstance(value, type):
        return value.__module__.startswith("lightning_thd")
    return type(value).__module__.startswith("lightning_thd")


def _code_is_ours(function: FunctionType, root: str) -> bool:
    return function.__code__.co_filename.startswith(root)


def replaced(root: str) -> set[str]:
    """Name each attribute of another package's module or class whose value is of this package."""
    names = {f"sys.meta_path[{i}]" for i, finder in enumerate(sys.meta_path) if is_ours(finder, root)}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in FOREIGN or not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                owner = f"{name}.{value.__qualname__}"
                names.update(f"{owner}.{k}" for k, v in list(vars(value).items()) if replaces(v, root))
            elif replaces(value, root):
                names.add(f"{name}.{key}")
    return names


def replaces(value: Any, root: str) -> bool:
    """Return whether a value replaces one of another package, also behind functools.wraps."""
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if isinstance(value, FunctionType):
        return _code_is_ours(value, root)
    return False if isinstance(value, ModuleType) else is_ours(value, root)


def count_changes(root: str) -> dict[str, list[str]]:
    """Return the attributes that are changed by import, then those more by building and training a model."""
    warnings.simplefilter("ignore")
    import lightning as L
    import torch
    import transformers
    from transformers.models.llama import modeling_llama  # noqa: F401

    importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    package = importlib.import_module("lightning_thd")
    # A face that loads lazily is asked for everything.
    for name in package.__all__:
        getattr(package, name)
    by_import = replaced(root)
    during: set[str] = set()

    class Looked(L.LightningModule):
        def configure_model(self) -> None:
            self.model = one_layer()
            during.update(replaced(root))
            self.model.register_forward_hook(lambda *_: during.update(replaced(root)))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return package.causal_lm_loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=1e-3)

    trainer = quiet_trainer(max_steps=2)
    trainer.fit(Looked(), package.THDDataModule(documents(), capacity=256))
    during |= replaced(root)
    assert transformers is not None
    return {"by import": sorted(by_import), "by building and training": sorted(during - by_import)}


# ---- what its classes inherit


def inherited(root: str) -> dict[str, list[str]]:
    """Return for each file the private names that its classes inherit from other packages, or override."""
    import lightning_thd

    names: dict[str, set[str]] = {}
    for info in pkgutil.walk_packages(lightning_thd.__path__, "lightning_thd."):
        if info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except Exception as error:  # an optional package is not there: said, not hidden
            print(f"{info.name}: {error}", file=sys.stderr)
            continue
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == info.name:
                file = str(Path(module.__file__ or "").relative_to(root))
                names.setdefault(file, set()).update(_private_names_of_bases(value))
    return {file: sorted(values) for file, values in sorted(names.items())}


def _private_names_of_bases(cls: type) -> set[str]:
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in FOREIGN:
            continue
        names.update(vars(base))
        try:
            names.update(re.findall(r"self\.(_\w+)\s*(?::[^=]+)?=[^=]", inspect.getsource(base)))
        except (OSError, TypeError):
            continue
    return {name for name in names if re.fullmatch(r"_[A-Za-z]\w*", name)}


# ---- the calls of a step


def documents() -> list[dict[str, list[int]]]:
    """Return the documents that are trained on."""
    return [{"input_ids": list(f"document {i} ".encode()) * (1 + i % 3)} for i in range(2_000)]


def one_layer() -> Any:
    """Build a Qwen3 of one layer."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="thd").train()


def quiet_trainer(**options: Any) -> Any:
    """Return a Trainer on one CPU that writes nothing."""
    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **options,
    )


def count_calls(root: str) -> list[tuple[str, str, int]]:
    """Return file, function and number of calls of the package in the steps that are counted."""
    import lightning as L
    import torch

    import lightning_thd

    calls: Counter[tuple[str, str]] = Counter()
    counting = False

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        named = code.co_name[0] != "<"
        if counting and named and event == "call" and code.co_filename.startswith(root):
            calls[code.co_filename.removeprefix(root), code.co_name] += 1

    class Window(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            nonlocal counting
            counting = FIRST_STEP <= trainer.global_step < LAST_STEP

    class OneLayer(L.LightningModule):
        def configure_model(self) -> None:
            self.model = one_layer()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return lightning_thd.causal_lm_loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=1e-3)

    trainer = quiet_trainer(max_steps=LAST_STEP + 5, callbacks=[Window()])
    module, data = OneLayer(), lightning_thd.THDDataModule(documents(), capacity=256)
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        trainer.fit(module, data)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted((file, name, number) for (file, name), number in calls.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", choices=["changes", "inherited", "calls"])
    count = parser.parse_args().count
    spec = importlib.util.find_spec("lightning_thd")
    assert spec is not None
    assert spec.origin is not None
    root = str(Path(spec.origin).parent) + "/"
    result = {"changes": count_changes, "inherited": inherited, "calls": count_calls}[count](root)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
