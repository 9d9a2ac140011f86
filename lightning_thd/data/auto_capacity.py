"""A Trainer whose model is ready -> the largest capacity of packs that trains, for ``capacity="auto"``.

The memory model (``lightning_thd.memory``) gives a capacity for the room on the device. A forward and a
backward pass of a full pack of random tokens prove it. Ranks that run their layers together begin with the
smallest of their capacities, and vote before every collective of the trial: if one runs out of memory, all
leave it. Other ranks try by themselves, and then agree on the smallest.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import lightning.pytorch as L
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_thd._find import outermost_models
from lightning_thd._modes import watch_operators
from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch
from lightning_thd.data.trainer_link import Job
from lightning_thd.loss import causal_lm_loss
from lightning_thd.memory import MemoryModel, Training
from lightning_thd.models.offload import offloads
from lightning_thd.models.tiles import tile_of
from lightning_thd.packing import Packs, Sequences
from lightning_thd.parallel.across_ranks import gather_ints

_GB = 10**9
# Capacities are multiples of this, and so of twice the number of up to 64 context-parallel ranks.
_MULTIPLE = 128
# The share of the free memory that a step may fill: gaps between blocks of the allocator take the rest.
_USABLE = 0.95
# After a trial that ran out of memory, the next one is so much smaller.
_SMALLER = 7 / 8
# The longest sequence of a trial pack for a stream, whose lengths are not known before it is read.
_LONGEST_OF_STREAM = 4096
_NUMBER = "Pass a number; `lightning-thd plan --memory` predicts the largest one."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:
    """What a search for the capacity knows: the model, how it is trained, and on what."""

    trainer: L.Trainer
    job: Job
    model: nn.Module
    memory: MemoryModel
    training: Training
    device: torch.device
    room: int  # bytes that the process may hold
    together: bool  # whether ranks run layers together, and so must run the same packs


def find_capacity(
    trainer: L.Trainer | None,
    job: Job,
    lengths: npt.NDArray[np.integer] | None,
    step: Packs | Sequences | None,
) -> int:
    """Find the largest capacity that trains; all ranks must call this together.

    Args:
        trainer: the Trainer, whose strategy has placed the model.
        job: the job of this Trainer.
        lengths: the lengths of the sequences, which bound the capacity; None for a stream.
        step: the data module's ``global_batch``.

    Returns:
        A multiple of 128 slots, the same on all ranks.

    Raises:
        MisconfigurationException: if there is no Trainer that trains, no GPU, or a layout without a search.
        ValueError: if no memory count is known for the model, or not even the smallest pack fits.
    """
    search = _begin(trainer, job, step)
    capacity = search.memory.largest_capacity(search.room, search.training, multiple=_MULTIPLE)
    longest = _LONGEST_OF_STREAM
    if lengths is not None:
        longest = int(lengths.max(initial=1))
        capacity = min(capacity, _round_up(int(lengths.sum()), _MULTIPLE))

    if search.together:
        capacity = _agreed(capacity, search.device)
        if capacity and not _train_together(search, capacity, longest):
            raise RuntimeError(
                f"capacity='auto': a trial pack of {capacity:,} slots, which were predicted to fit, ran out "
                "of memory on a rank. All ranks left it in the middle of sharded layers, which cannot run "
                f"again in this process. Pass capacity={_smaller(capacity)}, or less."
            )
    else:
        while capacity and not _trains(search, capacity, longest):
            capacity = _smaller(capacity)
        capacity = _agreed(capacity, search.device)

    if not capacity:
        least = min(value for (value,) in gather_ints([search.room], group=None, device=search.device))
        raise ValueError(_why_nothing_fits(search, least))
    _announce(search, capacity, lengths)
    return capacity


def refuse_other_loops() -> NoReturn:
    """Raise MisconfigurationException, because only Lightning's Trainer says when the model is ready."""
    raise MisconfigurationException(
        "capacity='auto' needs Lightning's Trainer, which says when the model is ready. For Fabric, "
        f"Accelerate, transformers' Trainer or a loop by hand: {_NUMBER}"
    )


def _begin(trainer: L.Trainer | None, job: Job, step: Packs | Sequences | None) -> _Search:
    """Refuse what has no search, and describe how the Trainer trains its model."""
    if trainer is None:
        refuse_other_loops()
    if trainer.state.fn != TrainerFn.FITTING:
        raise MisconfigurationException(
            f"capacity='auto' is found when training begins, and this Trainer runs {trainer.state.fn}. Run "
            f"fit first, or pass ckpt_path=. {_NUMBER}"
        )

    strategy: Any = trainer.strategy
    device: torch.device = strategy.root_device
    room = _room(device)
    if room is None:
        raise MisconfigurationException(
            f"capacity='auto' fills the memory of a GPU, but the model is on {device}. {_NUMBER}"
        )

    sizes = _sizes_of(trainer)
    model = _trained_model(trainer.lightning_module)
    training = Training(
        precision=_precision_of(trainer, model),
        optimizer=_optimizer_of(trainer.optimizers),
        checkpointing=any(getattr(child, "gradient_checkpointing", False) for child in model.modules()),
        mlp_tile=tile_of(model),
        offload=offloads(model),
        **_adapters_of(model),
        data=sizes["data"],
        sharded=sizes["cuts"] and sizes["data"] * sizes["context"] > 1,
        context=sizes["context"],
        tensor=sizes["tensor"],
        accumulates=isinstance(step, Sequences) or job.accumulate > 1,
        device="cuda" if device.type == "cuda" else "cpu",
    )
    return _Search(
        trainer=trainer,
        job=job,
        model=model,
        memory=MemoryModel.from_config(model.config),
        training=training,
        device=device,
        room=room,
        together=sizes["together"],
    )


def _room(device: torch.device) -> int | None:
    """Return the bytes that this process may hold on a device, weights included; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int((free + torch.cuda.memory_reserved(device)) * _USABLE)


def _sizes_of(trainer: L.Trainer) -> dict[str, Any]:
    """Return the ranks along each axis, whether weights are cut, and whether ranks run layers together."""
    strategy: Any = trainer.strategy
    sizes = getattr(strategy, "sizes", None)
    if sizes is not None and (sizes.pipeline > 1 or strategy.sharing is not None):
        raise MisconfigurationException(
            "capacity='auto' has no trial pack for pipelines and context_parallel_size='dynamic', whose "
            f"ranks run different parts at once. {_NUMBER}"
        )

    cuts = isinstance(strategy, ModelParallelStrategy)
    if sizes is None and not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        raise MisconfigurationException(
            f"capacity='auto' does not know how {type(strategy).__name__} places weights. Use one device, "
            f"DDP, 'thd_ddp' or 'thd_model_parallel'. {_NUMBER}"
        )
    if sizes is None:
        return {"data": trainer.world_size, "context": 1, "tensor": 1, "cuts": False, "together": False}
    together = (cuts and sizes.world > 1) or sizes.peers > 1
    return {
        "data": sizes.data,
        "context": sizes.context,
        "tensor": sizes.tensor,
        "cuts": cuts,
        "together": together,
    }


def _trained_model(module: nn.Module) -> Any:
    """Return the only language model of a module, which is trained."""
    models = list(outermost_models(module).values())
    if len(models) == 1 and hasattr(models[0], "get_output_embeddings"):
        model = models[0]
        if any(parameter.requires_grad for parameter in model.parameters()):
            return model

    names = [type(model).__name__ for model in models]
    raise MisconfigurationException(
        f"capacity='auto' tries packs on one causal language model, which is trained; "
        f"{type(module).__name__} holds {names or 'none of transformers'}. {_NUMBER}"
    )


def _precision_of(trainer: L.Trainer, model: nn.Module) -> Any:
    """Return the precision for the memory model, by the Trainer's name for it and the weights' dtypes."""
    if str(trainer.precision).endswith("mixed"):
        return "bf16-mixed"
    dtypes = {
        parameter.dtype for parameter in model.parameters() if parameter.requires_grad or parameter.ndim > 1
    }
    return "bf16-true" if dtypes & {torch.bfloat16, torch.float16} else "32-true"


def _optimizer_of(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """Return the optimizer's name for the memory model; one that is not known counts as AdamW."""
    if not optimizers or not all(isinstance(optimizer, torch.optim.SGD) for optimizer in optimizers):
        return "adamw"
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    has_momentum = any(group["momentum"] for group in groups)
    return "sgd-momentum" if has_momentum else "sgd"


def _adapters_of(model: nn.Module) -> dict[str, Any]:
    """Return the rank and the targets of LoRA adapters, if only these are trained."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ranks = [p.shape[0] for name, p in trained.items() if "lora_A" in name]
    if not ranks or not all("lora_" in name for name in trained):
        return {}
    in_mlp = any("mlp" in name or "down_proj" in name for name in trained)
    return {"lora_rank": max(ranks), "lora_targets": "all" if in_mlp else "attention"}


# ---- The trial


def _trains(search: _Search, capacity: int, longest: int) -> bool:
    """Run a full pack forward and backward; return whether the device could hold it."""
    state = search.memory.moments(capacity, search.training)["update of the weights"].optimizer
    try:
        # A validation before training runs in inference mode.
        with torch.inference_mode(False), torch.enable_grad(), isolate_rng(), _as_before(search.model):
            # The optimizer makes its states in the first step. After a resume they exist, perhaps wider than
            # the memory model counts them.
            missing = max(0, state - _state_bytes(search.trainer))
            state_to_come = torch.empty(missing, dtype=torch.uint8, device=search.device)

            batch = _full_pack(search.memory.vocabulary, capacity, longest, search.job.alignment)
            batch = search.trainer.strategy.batch_to_device(batch, search.device, 0)
            with search.trainer.precision_plugin.train_step_context():
                loss = causal_lm_loss(search.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            del state_to_come, loss, batch
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        if search.device.type == "cuda":
            torch.cuda.empty_cache()
    return True


# What a rank says when ranks vote.
_WELL, _OUT_OF_MEMORY, _FAILED = range(3)


class _Votes:
    """Lets all ranks vote before every collective, so that none waits in one for a rank that has left.

    All ranks run the same collectives. So the vote of a rank that leaves a trial meets the next vote of the
    others. Messages between two ranks are no collectives.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.over = False  # whether a vote has ended the trial

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, after a vote if it is a collective."""
        if _is_collective(func) and not self.cast(_WELL):
            raise torch.OutOfMemoryError("another rank ran out of memory")
        return func(*args, **kwargs)

    def cast(self, state: int) -> bool:
        """Vote, and return whether all ranks are well; RuntimeError if another one has failed otherwise."""
        states = {value for (value,) in gather_ints([state], group=None, device=self._device)}
        self.over = states != {_WELL}
        if _FAILED in states and state != _FAILED:
            raise RuntimeError("A trial pack of capacity='auto' failed on another rank, which says why.")
        return not self.over


def _is_collective(func: Any) -> bool:
    """Return whether an operator starts a collective of all ranks of a group."""
    if not func.namespace.startswith(("c10d", "_c10d_functional")):
        return False
    _, _, operator = func.name().partition("::")
    return not operator.startswith(("send", "recv", "wait_tensor"))


def _train_together(search: _Search, capacity: int, longest: int) -> bool:
    """Run a full pack on all ranks; return whether the devices of all could hold it; a collective."""
    votes = _Votes(search.device)
    try:
        with watch_operators(votes.call):
            trained = _trains(search, capacity, longest)
    except Exception:  # any error of the user's model; the other ranks wait for this one's vote
        if not votes.over:
            votes.cast(_FAILED)
        raise
    if votes.over:
        return False
    return votes.cast(_WELL if trained else _OUT_OF_MEMORY)


def _state_bytes(trainer: L.Trainer) -> int:
    """Return the bytes of the optimizer states that exist, after a resume for example."""
    states = (state for optimizer in trainer.optimizers for state in optimizer.state.values())
    tensors = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
    # This rank holds only its shard of a sharded state.
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(part.nbytes for part in parts)


def _full_pack(vocabulary: int, capacity: int, longest: int, align: Alignment | None) -> THDBatch:
    """Collate random tokens into a pack of ``capacity`` slots, of sequences as long as the data's longest."""
    multiple = 1 if align is None else align.sequence_multiple
    length = max(multiple, min(longest, capacity) // multiple * multiple)
    lengths = [length] * (capacity // length)
    rest = (capacity - sum(lengths)) // multiple * multiple
    if rest:
        lengths.append(rest)

    ids = np.random.default_rng(0).integers(0, vocabulary, capacity)
    ends = np.cumsum(lengths, dtype=np.int64)
    rows = np.split(ids, ends)[:-1]  # the part after the last end does not fill another multiple
    return THDBatch.collate([{"input_ids": row} for row in rows], align=align)


@contextlib.contextmanager
def _as_before(model: nn.Module) -> Generator[None]:
    """Train a model inside this context, and give it its gradients, buffers and modes back."""
    modes = {module: module.training for module in model.modules()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}

    model.train()
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
        for module, mode in modes.items():
            module.training = mode


# ---- Numbers and messages


def _round_up(number: int, multiple: int) -> int:
    """Return the least multiple, at least one, that is not below the number."""
    return max(1, math.ceil(number / multiple)) * multiple


def _smaller(capacity: int) -> int:
    """Return the capacity to try after one that ran out of memory; 0 if none is left."""
    return int(capacity * _SMALLER) // _MULTIPLE * _MULTIPLE


def _agreed(capacity: int, device: torch.device) -> int:
    """Return the smallest capacity of all ranks; a collective."""
    return min(value for (value,) in gather_ints([capacity], group=None, device=device))


def _why_nothing_fits(search: _Search, least: int) -> str:
    """Return the message for a model that trains on no pack; ``least`` is the smallest room of all ranks."""
    moment, parts = search.memory.at_peak(_MULTIPLE, search.training)
    return (
        f"capacity='auto': not even a pack of {_MULTIPLE} slots trains. It is predicted to take "
        f"{parts.total / _GB:.3g} GB ({moment}; most of it for {parts.largest}), and the rank with the least "
        f"memory has {least / _GB:.3g} GB. Shard the weights over more devices, train adapters, or take a "
        "smaller optimizer: `lightning-thd plan --memory` compares them."
    )


def _announce(search: _Search, capacity: int, lengths: npt.NDArray[np.integer] | None) -> None:
    """Print the capacity, the memory that it is predicted to take, and what bounds it."""
    moment, parts = search.memory.at_peak(capacity, search.training)
    bound = f"{parts.largest} ({getattr(parts, parts.largest) / _GB:,.2f} GB)"
    if lengths is not None and capacity >= int(lengths.sum()):
        bound = "the data, which it holds whole"
    rank_zero_info(
        f"capacity='auto': {capacity:,} slots. A step is predicted to take {parts.total / _GB:,.2f} of "
        f"{search.room / _GB:,.2f} GB, most in the {moment}; bounded by {bound}. A full pack ran."
    )
