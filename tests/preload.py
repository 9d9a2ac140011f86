"""What the fork server imports once, so that no rank of any test has to: 2 s for eight ranks, not 23 s."""

import gc
import importlib

from lightning_thd.data import stdlib_documents

for _name in (
    "torch.distributed.tensor",
    "lightning.pytorch",
    "lightning_thd",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.trainer",
    "tests.models.families",
    "accelerate",
    "pytest",
):
    importlib.import_module(_name)

stdlib_documents()  # the examples read it, and it is parsed once

gc.collect()
gc.freeze()  # a rank that collects garbage looks only at what came after
