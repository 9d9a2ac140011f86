"""Without other packages' private names the package imports and trains; what needs one says so."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning
import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn

from benchmarks.house_run import inherited
from benchmarks.house_text import foreign_names, read_package
from lightning_thd._private import PRIVATE, PrivateNameGone, private, private_of, set_private
from tests.tiny import checkpoint_activations

ROOT = Path(__file__).parent.parent


def loop() -> Any:
    return L.Trainer(logger=False, enable_checkpointing=False).fit_loop


def raw_kernels(module: str) -> Callable[[], Any]:
    return lambda: pytest.importorskip(module)


def checkpointed_layer() -> Any:
    model = llama()
    checkpoint_activations(model)
    return model.model.layers[0]


def marked() -> Any:
    parameter: Any = nn.Parameter(torch.zeros(1))
    parameter._is_hf_initialized = True
    return parameter


def prepared_by_fabric() -> Any:
    return lightning.Fabric(accelerator="cpu", devices=1).setup(nn.Linear(2, 2))


def trainer_of_transformers() -> Any:
    return pytest.importorskip("transformers").Trainer


def operator() -> Any:
    @torch.library.custom_op("lightning_thd_tests::copy", mutates_args=())
    def copy(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    return copy


def logged_value() -> Any:
    """Return what Lightning keeps of a value that a module logs."""
    result = importlib.import_module("lightning.pytorch.trainer.connectors.logger_connector.result")
    meta = result._Metadata("training_step", "loss")
    meta.sync = result._Sync(fn=None)
    return result._ResultMetric(meta, is_tensor=True)


def iterable_dataset() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.IterableDataset.from_generator(lambda: iter([{"a": 1}]))


def experts() -> Any:
    transformers = pytest.importorskip("transformers")
    moe = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    sizes = {"hidden_size": 8, "moe_intermediate_size": 8, "num_experts": 2}
    return moe.Qwen3MoeExperts(transformers.Qwen3MoeConfig(**sizes))


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **sizes))


# What an attribute in the table belongs to -> an object of that class. All other names are importable.
OWNERS: dict[str, Callable[[], Any]] = {
    "datasets.IterableDataset": iterable_dataset,
    "lightning.pytorch.LightningModule": L.LightningModule,
    "lightning.pytorch.Trainer": lambda: L.Trainer(logger=False, enable_checkpointing=False),
    "lightning.Fabric.setup": prepared_by_fabric,
    "lightning.pytorch.Trainer.fit_loop": loop,
    "lightning.pytorch.Trainer.fit_loop.epoch_loop": lambda: loop().epoch_loop,
    "flash_attn.flash_attn_interface": raw_kernels("flash_attn.flash_attn_interface"),
    "flash_attn.cute.interface": raw_kernels("flash_attn.cute.interface"),
    "flash_attn_interface": raw_kernels("flash_attn_interface"),
    "lightning.pytorch.strategies.DDPStrategy": DDPStrategy,
    "lightning.pytorch.strategies.ModelParallelStrategy": ModelParallelStrategy,
    "lightning.pytorch.Trainer._logger_connector": (
        lambda: L.Trainer(logger=False, enable_checkpointing=False)._logger_connector
    ),
    "lightning.pytorch.Trainer._results.values": logged_value,
    "lightning.pytorch.Trainer._results.values.meta.sync": lambda: logged_value().meta.sync,
    "torch.Tensor": lambda: torch.zeros(1, requires_grad=True),
    "torch.library.CustomOpDef": operator,
    "torch.nn.Module": lambda: nn.Linear(2, 2),
    "torch.ops.mkldnn": lambda: torch.ops.mkldnn,
    "torch.ops.operator": lambda: torch.ops.aten.add.Tensor,
    "torch.optim.AdamW": lambda: torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True),
    "trl.SFTTrainer": lambda: pytest.importorskip("trl").SFTTrainer,
    "transformers.GradientCheckpointingLayer": checkpointed_layer,
    "transformers.ProcessorMixin": lambda: pytest.importorskip("transformers").LlavaProcessor,
    "transformers.Trainer": trainer_of_transformers,
    "transformers.initialization.tensor": marked,
    "transformers.PreTrainedConfig": lambda: llama().config,
    "transformers.PreTrainedModel": llama,
    "transformers.integrations.moe.use_experts_implementation": experts,
}
IMPORTED = [name for name in PRIVATE if name.rpartition(".")[0] not in OWNERS]
ATTRIBUTES = [name for name in PRIVATE if name not in IMPORTED]
READ_ONLY = ("lightning.pytorch.Trainer._results", "torch.Tensor._version")
# torch's own optimizers and modules do not work without these.
NEEDED_BY_TORCH = (
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._dynamo",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._are_functorch_transforms_active",
    "torch.utils._python_dispatch.TorchDispatchMode",
)
ONLY_WITH_CUDA = ("torch._C._cuda_endAllocateToPool", "torch._C._cuda_releasePool")
TRAIN = """
import sys
from lightning_thd._private import _owner
import lightning.pytorch, torch.distributed.tensor.experimental, torch.utils.data

for name in sys.argv[1:]:
    path, _, attribute = name.rpartition(".")
    delattr(_owner(path), attribute)

import lightning as L
import torch
from lightning_thd import *
from tests.tiny import tiny_llama

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny_llama()

    def training_step(self, batch, _):
        return causal_lm_loss(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

rows = [{"input_ids": [1, 2, 3, 4]}] * 16
for step, strategy in ((Packs(1), "auto"), (Sequences(4), "thd")):
    trainer = L.Trainer(
        max_steps=2, accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[THDThroughputMonitor()],
    )
    trainer.fit(Module(), THDDataModule(rows, capacity=16, global_batch=step))
    assert trainer.global_step == 2
print("trained")
"""


@pytest.mark.parametrize("name", IMPORTED)
def test_the_message_about_an_imported_name_that_is_gone_names_its_feature(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ONLY_WITH_CUDA and not hasattr(torch._C, name.rpartition(".")[2]):
        pytest.skip("only builds of torch for CUDA have it")
    value = private(name)
    attribute = name.rpartition(".")[2]
    monkeypatch.delattr(name)
    if isinstance(value, ModuleType):
        # Import finds it again, so that its parent has to be unable to.
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PrivateNameGone, match=f"^{said(name)}.* needs .*{attribute}"):
        private(name)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_the_message_about_an_attribute_that_is_gone_names_its_feature(name: str) -> None:
    path, _, attribute = name.rpartition(".")
    owner = OWNERS[path]()
    value = private_of(owner, name)  # the object has it, with any value
    if name not in READ_ONLY:
        set_private(owner, name, value)
    with pytest.raises(PrivateNameGone, match=f"^{said(name)}.* needs .*{attribute}"):
        private_of(object(), name)
    with pytest.raises(PrivateNameGone, match=f"^{said(name)}.* needs .*{attribute}"):
        set_private(Bare(), name, value)


class Bare:
    """An object that takes any attribute."""


def said(name: str) -> str:
    """Return a pattern for the beginning of the message about a name."""
    return re.escape(PRIVATE[name].feature)


@pytest.mark.parametrize("name", PRIVATE)
def test_the_table_names_the_file_that_uses_it(name: str) -> None:
    text = (ROOT / "lightning_thd" / PRIVATE[name].place).read_text()
    attribute = name.rpartition(".")[2]
    assert "from lightning_thd._private import " in text
    assert f'.{attribute}"' in text, f"{PRIVATE[name].place} takes no {attribute} by private(...)"


def test_the_page_about_other_packages_shows_the_table() -> None:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.replaced()
    for name, row in PRIVATE.items():
        assert f"| `{name}` | `lightning_thd/{row.place}` | {row.checked} | {row.feature} |" in page


def test_without_any_of_them_the_package_imports_and_trains() -> None:
    gone = [name for name in IMPORTED if name not in (*NEEDED_BY_TORCH, *ONLY_WITH_CUDA)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAIN, *gone],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "trained"


def test_every_private_name_that_the_package_uses_is_in_the_table() -> None:
    files = read_package(ROOT)
    overridden = {file: set(names) for file, names in inherited(str(ROOT)).items()}
    uses, _, _ = foreign_names(files, overridden)
    known = {part for name in PRIVATE for part in name.split(".")}
    assert [str(use) for use in uses if use.name not in known] == []
    assert uses, "the search finds names"
