"""Every place where this package replaces a function of another package, such as torch or transformers.

``PATCHES`` has a row for each. The first is the only permanent one in a class or module. Those marked "for a
while" are undone at the end of a ``with`` block or a run. Objects whose class is replaced by a subclass of it
have a row too.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Patch(NamedTuple):
    """One replacement."""

    what: str  # the names that are replaced
    where: str  # the module that replaces them and explains why, or the folder of several such modules


PATCHES: Final[dict[str, Patch]] = {
    "attention chosen": Patch("PreTrainedModel.get_correct_attn_implementation", "models"),
    "adapted classes": Patch(
        '__class__ of models with "thd" and of their layers, by a subclass', "models/adapted.py"
    ),
    "refused switches": Patch(
        "__class__ of models that ignore the choice of their attention, such as Bloom, by a subclass",
        "models/unswitchable.py",
    ),
    "noted reads": Patch(
        "__class__ of a LightningModule, by a subclass, for a while", "cuda_graph/fingerprint.py"
    ),
    "mixer kernels": Patch(
        "convolutions, scans and delta rules in a modeling file, while a layer runs on a shard",
        "models/passing/adopt.py",
    ),
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
    "first passes": Patch("forward of a pipeline's decoder, on the object", "strategies/pipeline.py"),
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
    "first steps": Patch("step methods of a LightningModule, on the object, for the first pack", "data"),
    "worker info": Patch("torch.utils.data._utils.worker._worker_info, for a while", "data"),
}
