"""What the fork server imports once, so that no rank of any test has to: 2 s for eight ranks, not 23 s."""

import gc
import importlib
from unittest import mock

from lightning_thd.data import stdlib_documents

_NAMES = (
    "torch.distributed.tensor",
    "lightning.pytorch",
    "lightning_thd",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.trainer",
    "tests.models.families",
    "accelerate",
    "pytest",
)

# torchao, which transformers imports, asks for the GPU, and no process forked after CUDA began can use it.
with (
    mock.patch("torch.utils._triton.has_triton", return_value=False),
    mock.patch("torch.cuda.get_device_capability", return_value=(0, 0)),
):
    for _name in _NAMES:
        importlib.import_module(_name)

stdlib_documents()  # the examples read it, and it is parsed once

gc.collect()
gc.freeze()  # a rank that collects garbage looks only at what came after
