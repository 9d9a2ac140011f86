"""The package's public names load when they are used, and everything that finds them by name still does."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lightning_thd

ROOT = Path(__file__).parent.parent
MONITOR = """
import sys
from lightning_thd import FlopsModel, THDThroughputMonitor
from lightning_thd.seqlens import cu_seqlens_from_lengths
from lightning_thd.stats import SeqStats
THDThroughputMonitor()
loaded = {name.split(".")[1] for name in sys.modules if name.startswith("lightning_thd.")}
print(*sorted(loaded))
"""
TRAINER = """
import lightning_thd
import lightning as L
assert not {"THDBatch", "loss"} & set(vars(lightning_thd)), "a name was imported before its use"
trainer = L.Trainer(strategy="thd", accelerator="cpu", logger=False)
assert type(trainer.strategy).__name__ == "THDSingleDeviceStrategy", trainer.strategy
assert lightning_thd.loss.policy.__name__ == "lightning_thd.loss.policy"
print("done")
"""
STAR = """
import pickle
before = set(globals())
from lightning_thd import *
import lightning_thd
missing = set(lightning_thd.__all__) - set(globals())
assert not missing, missing
batch = THDBatch.collate([{"input_ids": [1, 2, 3]}])
for value in (THDBatch, THDDataModule, Packs(2), THDThroughputMonitor, causal_lm_loss, batch):
    pickle.loads(pickle.dumps(value))
import transformers
assert "thd" in transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
print("done")
"""
SHORT_NAMES = """
import sys
from lightning.pytorch.cli import LightningCLI
from lightning_thd import THDDataModule
from lightning_thd.module import CausalLMModule
cli = LightningCLI(
    run=False,
    save_config_callback=None,
    datamodule_class=None,
    model_class=CausalLMModule,
    args=[
        "--model.config=" + sys.argv[1],
        '--trainer.strategy={"class_path": "THDSingleDeviceStrategy"}',
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
        "--trainer.callbacks+=THDThroughputMonitor",
        "--trainer.callbacks+=PackingCheck",
        "--trainer.callbacks+=ExpertBias",
    ],
)
print(type(cli.trainer.strategy).__name__, *(type(c).__name__ for c in cli.trainer.callbacks))
"""
WITHOUT_TRANSFORMERS = """
import sys
import lightning

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name in ("transformers.modeling_utils", "transformers.masking_utils"):
            raise ImportError("a part of transformers is missing")

for name in [name for name in sys.modules if name.startswith("transformers")]:
    del sys.modules[name]
sys.meta_path.insert(0, Broken())
from lightning_thd import THDBatch, THDDataModule, THDThroughputMonitor, varlen_attention
data = THDDataModule([{"input_ids": [1, 2, 3]}] * 9, capacity=8)
data.setup("fit")
print(len(list(data.train_dataloader())))
"""


def run(code: str, *arguments: str) -> str:
    """Run code in a fresh process and return the last line that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_the_monitor_loads_no_attention_losses_or_graphs() -> None:
    loaded = set(run(MONITOR).split())
    assert "callbacks" in loaded
    assert not loaded & {"attention", "models", "loss", "cuda_graph", "data", "packing", "strategies"}


def test_a_trainer_knows_our_strategies_after_a_bare_import() -> None:
    assert run(TRAINER) == "done"


def test_an_import_of_all_names_and_pickles() -> None:
    assert run(STAR) == "done"


def test_short_names_in_a_lightning_cli() -> None:
    pytest.importorskip("jsonargparse")
    pytest.importorskip("transformers")
    sizes = '{"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}'
    names = run(SHORT_NAMES, sizes).split()
    assert names[0] == "THDSingleDeviceStrategy"
    assert {"THDThroughputMonitor", "PackingCheck", "ExpertBias"} <= set(names[1:])


KNOWS_THD = """
import sys
exec(sys.argv[1])
from transformers import AutoModelForCausalLM, LlamaConfig
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=8, **sizes), attn_implementation="thd")
print(model.config._attn_implementation)
"""


@pytest.mark.parametrize(
    "statement",
    [
        "from lightning_thd.batch import THDBatch",
        pytest.param("from lightning_thd.attention import varlen_attention", marks=pytest.mark.slow),
        pytest.param("from lightning_thd.packing import PackPlanner", marks=pytest.mark.slow),
        pytest.param("from lightning_thd.parallel import shard_batch", marks=pytest.mark.slow),
        pytest.param("import lightning_thd.loss", marks=pytest.mark.slow),
        "import lightning_thd; lightning_thd.batch.THDBatch",
    ],
)
def test_transformers_knows_thd_once_a_name_of_a_package_is_used(statement: str) -> None:
    assert run(KNOWS_THD, statement) == "thd"


def test_a_transformers_that_cannot_be_imported_leaves_the_rest_working() -> None:
    assert run(WITHOUT_TRANSFORMERS) == "5"


def test_dir_lists_names_and_submodules() -> None:
    assert {*lightning_thd.__all__, "loss", "models", "packing", "__version__"} <= set(dir(lightning_thd))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lightning_thd' has no attribute 'causal_lm_los'"):
        lightning_thd.causal_lm_los  # noqa: B018


@pytest.mark.slow
def test_a_type_checker_sees_the_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(
        "import lightning_thd\n"
        "from lightning_thd import THDBatch, causal_lm_loss\n"
        "from lightning_thd.callbacks import ExpertBias\n"
        "reveal_type(THDBatch.collate([]))\n"
        "lightning_thd.nothing\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path), "user.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert 'Revealed type is "lightning_thd.batch.thd_batch.THDBatch"' in done.stdout, done.stdout
    assert 'Module has no attribute "nothing"' in done.stdout, done.stdout


@pytest.mark.parametrize("folder", ["attention", "batch", "packing", "parallel"])
def test_names_of_a_package_are_not_hidden_by_its_modules(folder: str) -> None:
    package = importlib.import_module(f"lightning_thd.{folder}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    hidden = [name for name in package.__all__ if isinstance(getattr(package, name), ModuleType)]
    assert hidden == []
