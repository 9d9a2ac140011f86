"""Every place where this package replaces a function of another package, such as torch or transformers.

``PATCHES`` has a row for each. ``patch`` makes the permanent ones in classes and modules. Those marked "for a
while" are undone at the end of a ``with`` block or a run.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from torch import nn


class Patch(NamedTuple):
    """One replacement."""

    what: str  # the names that are replaced
    where: str  # the module that replaces them and explains why, or the folder of several such modules


PATCHES: Final[dict[str, Patch]] = {
    "attention chosen": Patch(
        "PreTrainedModel.get_correct_attn_implementation, .set_attn_implementation, .post_init",
        "models/announce.py",
    ),
    "guard": Patch("forward of every PreTrainedModel class", "models/announce.py"),
    "copies": Patch("PreTrainedModel.__setstate__", "models/announce.py"),
    "checkpoints": Patch(
        "PreTrainedModel._set_gradient_checkpointing, torch's CheckpointWrapper.__init__",
        "models/announce.py",
    ),
    "masks": Patch("transformers.masking_utils._preprocess_mask_arguments", "models/masks.py"),
    "mixers": Patch("forward of state-space, linear-attention and convolution layers", "models/mixers.py"),
    "mixer kernels": Patch(
        "causal convolutions, scans and delta rules in transformers' modeling files",
        "models/passing/adopt.py",
    ),
    "position tables": Patch("forward of position embeddings of the RoBERTa kind", "models/positions.py"),
    "row scales": Patch(
        "forward of attention that scales queries by their slot in the row, as Llama 4's does without rope",
        "models/positions.py",
    ),
    "vision towers": Patch(
        "forward of Qwen-VL's vision towers, is_flash_attention_requested in their files", "models/towers.py"
    ),
    "ropes": Patch("forward of rotary embeddings with longrope or dynamic ropes", "models/positions.py"),
    "zero embeddings": Patch("forward of Gemma 3n's scaled word embeddings", "models/positions.py"),
    "classifiers": Patch("forward of ...ForSequenceClassification", "models/pooled_heads.py"),
    "postponed weights": Patch(
        "PreTrainedModel._load_pretrained_model, ._finalize_model_loading, for a while", "models/weights.py"
    ),
    "seeded weights": Patch("the functions of transformers.initialization, for a while", "models/weights.py"),
    "head call": Patch(
        "forward of a model and of its head, on the objects, for a while", "loss/head_call.py"
    ),
    "experts' loss": Patch(
        "transformers' load_balancing_loss_func in one modeling file, for a while", "loss/router_balance.py"
    ),
    "cut layers": Patch(
        "forward of layers cut by tensor parallelism, sequence parallelism or pipelines, on the objects",
        "parallel",
    ),
    "metrics": Patch("_forward_cache, _computed and process_group of torchmetrics' objects", "strategies"),
    "stage norms": Patch(
        "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype, for a while", "strategies"
    ),
    "pipeline logs": Patch("LightningModule.log on the object, for a while", "strategies"),
    "graphed step": Patch(
        "training_step of a LightningModule and forward of a model, on the objects, for a while", "cuda_graph"
    ),
    "guarded captures": Patch(
        "LightningModule._trainer, torch.get_rng_state and .set_rng_state, "
        "torch.utils.checkpoint.get_device_states, for a while",
        "cuda_graph",
    ),
    "autocast on meta": Patch(
        "torch's functions that read autocast, torch.amp.autocast_mode.is_autocast_available, for a while",
        "cuda_graph",
    ),
    "saving": Patch("Trainer.save_checkpoint on the object, for a while", "callbacks"),
    "rows as packs": Patch("forward of a TRL trainer's model, on the object", "integrations"),
    "resumed counters": Patch(
        "counters of Lightning's loops; hooks of LightningDataModule, on the object", "data"
    ),
    "worker info": Patch("torch.utils.data._utils.worker._worker_info, for a while", "data"),
}
# What ``patch`` has replaced in this process: (row, "module.Class.name").
APPLIED: Final[set[tuple[str, str]]] = set()


def patch(row: str, owner: Any, name: str, value: Any) -> None:
    """Replace the attribute ``name`` of a class or module permanently; ``row`` is its key in ``PATCHES``."""
    assert row in PATCHES, row
    path = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    APPLIED.add((row, f"{path}.{name}"))
    setattr(owner, name, value)


def layer_classes(model_class: type) -> Iterator[Any]:
    """Yield each nn.Module class that the files of a model class and of its bases define or import."""
    for name in dict.fromkeys(base.__module__ for base in model_class.__mro__):
        for cls in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            if inspect.isclass(cls) and issubclass(cls, nn.Module):
                yield cls


def patch_forward(
    row: str, cls: Any, mark: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a class's forward by ``make(forward)``, unless the forward has the attribute ``mark``."""
    if not hasattr(cls.forward, mark):
        made = make(cls.forward)
        setattr(made, mark, True)
        patch(row, cls, "forward", made)
