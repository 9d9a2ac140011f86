"""Another package renames a private name -> we import, the monitor works, the feature refuses or works.

Each case rewrites the source of a package while a process imports it. The package itself uses the new name
everywhere, as a later release would.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Case(NamedTuple):
    name: str  # the private name, or an argument's
    package: str  # whose source is rewritten
    feature: str  # a function below
    works: bool  # whether the feature works all the same; else it raises an error that says the name


CASES = (
    Case("_preprocess_mask_arguments", "transformers.masking_utils", "packs", works=True),
    Case("_set_gradient_checkpointing", "transformers.modeling_utils", "checkpointed", works=True),
    Case("_load_pretrained_model", "transformers.modeling_utils", "late_weights", works=False),
    Case("_combined_loader_states_to_load", "lightning.pytorch", "streams", works=False),
    Case("_worker_info", "torch.utils.data", "streams_of_workers", works=True),
    # The method that chooses a model's attention is public: with another argument, or gone.
    Case("requested_attention", "transformers.modeling_utils", "built", works=False),
    Case("requested_attention", "transformers.modeling_utils", "switched", works=False),
    Case("get_correct_attn_implementation", "transformers", "packs", works=False),
)


class Renaming(importlib.abc.MetaPathFinder):
    """Imports the modules of a package from sources in which a name is replaced."""

    def __init__(self, name: str, package: str) -> None:
        self.name = name
        self.package = package

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname != self.package and not fullname.startswith(f"{self.package}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Renamed(self.name, spec.loader.name, spec.loader.path)
        return spec


class _Renamed(importlib.machinery.SourceFileLoader):
    def __init__(self, renamed: str, name: str, path: str) -> None:
        super().__init__(name, path)
        self.renamed = renamed

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text(encoding="utf-8")
        source = re.sub(rf"(?<!\w){self.renamed}\b", f"{self.renamed}_of_later", source)
        return compile(source, self.path, "exec", dont_inherit=True)


# ---- What the processes run


def monitor() -> None:
    """Train a plain module on padded rows with the monitor."""
    import lightning as L
    import torch

    from lightning_thd import THDThroughputMonitor

    class Padded(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 10))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.model(batch["input_ids"]).logsumexp(-1).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    rows = [{"input_ids": torch.ones_like(mask), "attention_mask": mask}] * 4
    measured = THDThroughputMonitor(peak=1e12, every_n_steps=2)
    _trainer(4, measured).fit(Padded(), torch.utils.data.DataLoader(rows, batch_size=None))  # type: ignore[arg-type]
    assert round(measured.latest["train/packing/fill"], 3) == 0.667


def _trainer(steps: int, *callbacks: Any) -> Any:
    import lightning as L

    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    return L.Trainer(max_steps=steps, callbacks=list(callbacks), accelerator="cpu", **off)


def built() -> None:
    """Build a model with "thd" without calling it."""
    from tests.tiny import tiny_llama

    tiny_llama()


def switched() -> None:
    """Build a model with another attention, and switch it to "thd"."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from lightning_thd.models import register_thd

    register_thd()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_attn_implementation("thd")


def packs() -> None:
    """Compare packed logits with those of each sequence by itself."""
    import torch

    from lightning_thd import THDBatch
    from tests.tiny import tiny_llama

    model = tiny_llama().eval()
    rows = [torch.arange(3, 3 + n) for n in (5, 1, 7)]
    batch = THDBatch.collate([{"input_ids": ids} for ids in rows])
    for ids, got in zip(rows, batch.unpack(model(**batch.hf_kwargs()).logits), strict=True):
        want = model(input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def checkpointed() -> None:
    """Compare gradients with those of a model whose activations are computed again in the backward pass."""
    import torch

    from lightning_thd import THDBatch, causal_lm_loss
    from tests.tiny import checkpoint_activations, sequences, tiny_llama

    models = [tiny_llama().train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    checkpoint_activations(models[1])
    for model in models:
        causal_lm_loss(model, THDBatch.collate(sequences(4))).backward()
    for plain, again in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(again.grad, plain.grad)


def late_weights() -> None:
    """Build a model without reading its weights, as strategies for large models do."""
    from lightning_thd.models.weights import postponed_reading

    with postponed_reading():
        pass


def streams(workers: int = 0) -> None:
    """Train two steps on a stream."""
    from lightning_thd import THDDataModule
    from tests.tiny import TinyModule, sequences

    data = THDDataModule(lambda: iter(sequences(200)), capacity=64, num_workers=workers)
    _trainer(2).fit(TinyModule(), data)


def streams_of_workers() -> None:
    """Train two steps on a stream that a worker reads."""
    streams(1)


# ---- The tests


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.feature}")
@pytest.mark.parametrize("part", ["import", "monitor", "feature"])
def test_a_renamed_private_name_stops_only_what_needs_it(case: Case, part: str) -> None:
    subject = {"import": "", "monitor": "monitor", "feature": case.feature}[part]
    command = [sys.executable, "-W", "ignore", "-m", "tests.test_renames", case.name, case.package, subject]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if part == "feature" and not case.works:
        assert done.returncode != 0
        assert case.name in done.stderr[-600:], done.stderr
    else:
        assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    sys.meta_path.insert(0, Renaming(sys.argv[1], sys.argv[2]))
    import lightning_thd  # noqa: F401

    assert importlib.util.find_spec(sys.argv[2]) is not None
    if sys.argv[3]:
        globals()[sys.argv[3]]()
