"""The experts that MoE routers choose -> metrics of the experts' load, and biases that balance the load."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_thd._checks import real_number
from lightning_thd._pages import see
from lightning_thd._static import in_backward, only_looking, shapes_are_static
from lightning_thd.callbacks.loggers import accumulates, record
from lightning_thd.callbacks.seen import kept_slots
from lightning_thd.parallel.across_ranks import communication_device, group_size, stage_group
from lightning_thd.parallel.experts import expert_ranks
from lightning_thd.parallel.routers import routers_of

_BIAS = "e_score_correction_bias"


class ExpertChoices:
    """Counts, by hooks on the routers, how many real tokens choose each expert; counts stay on the device."""

    # Only forward passes in training are counted. Compiled layers and CUDA graphs run no hooks.

    def __init__(self, module: nn.Module, group: Any = None) -> None:
        routers = _named_routers(module)
        self.names = [*routers]
        self.group = group
        self.device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))

        self._sizes: list[int] = [router.num_experts for router in routers.values()]  # type: ignore[misc]
        self._ranks = expert_ranks(module)
        self._counts: Tensor | None = None  # made at the first choice, on the device where the router runs
        self._mask: Any = None  # the attention_mask of the model's running call

        self._handles = [
            router.register_forward_hook(only_looking(functools.partial(self._count, layer)))
            for layer, router in enumerate(routers.values())
        ]
        if routers:
            look = only_looking(self._look)
            for child in module.modules():
                if hasattr(type(child), "get_input_embeddings"):  # a transformers model
                    self._handles.append(child.register_forward_pre_hook(look, with_kwargs=True))

    def _look(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Remember the attention_mask of a model's call, as a forward pre-hook."""
        if not torch.compiler.is_compiling():
            self._mask = kwargs.get("attention_mask")

    def _count(self, layer: int, router: nn.Module, args: Any, output: Any) -> None:
        """Count the choices of one call of a router, as a forward hook; ``layer`` is a row of the counts."""
        # Skip recomputation in the backward pass, which would count the same choices twice.
        if torch.compiler.is_compiling() or in_backward():
            return
        if not router.training or shapes_are_static() or not isinstance(output, tuple):
            return

        # Routers return logits and weights as floats; the int64 tensor [slots, k] has the chosen experts.
        chosen = next((x for x in output if isinstance(x, Tensor) and x.dtype == torch.int64), None)
        if chosen is None or chosen.ndim != 2:
            return

        counts = self._tensor(chosen.device)
        real_slots = self._real_slots(len(chosen))
        if real_slots is None:
            weights = torch.ones_like(chosen)
        else:
            weights = real_slots[:, None].expand_as(chosen).to(chosen.dtype)
        counts[layer].scatter_add_(0, chosen.flatten(), weights.flatten())

    def _real_slots(self, slots: int) -> Tensor | None:
        """Return which slots of the running call hold real tokens, bool ``[slots]``; None if all may."""
        # A monitor of models without packs does not load attention.
        from lightning_thd.models.pack import current_scope

        scope = current_scope()
        if scope is not None and scope.pack is not None and scope.pack.real_slots is not None:
            return scope.pack.real_slots
        if isinstance(self._mask, Tensor) and self._mask.numel() == slots:  # padded rows
            return kept_slots(self._mask).flatten()
        return None

    def _tensor(self, device: torch.device) -> Tensor:
        """Return the counts since the last ``take``, ``[layers, most experts]``."""
        if self._counts is None:
            shape = len(self._sizes), max(self._sizes, default=0)
            self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        return self._counts

    def take(self) -> Tensor:
        """Add up all ranks' choices since the last call, in a collective: ``[layers, most experts]``."""
        counts = self._tensor(self.device)
        several = group_size(self.group) > 1
        wire = communication_device(self.group, counts.device) if several else counts.device

        total = counts.to(wire, copy=True)
        counts.zero_()
        if several:
            dist.all_reduce(total, group=self.group)
        return total

    def close(self) -> dict[str, float]:
        """Return the metrics of the choices since the last call, after a collective and a device read."""
        counts = self.take().cpu().numpy()
        ran = counts.any(axis=1)  # some models do not run all their routers
        if not ran.any():
            return {}
        counts = counts[ran]
        sizes = np.array(self._sizes)[ran]

        # The busiest expert's tokens over the mean of the layer's experts; 1.0 is a perfect balance.
        imbalance = counts.max(axis=1) * sizes / counts.sum(axis=1)
        metrics = {
            "experts/imbalance": float(imbalance.mean()),
            "experts/worst_layer": float(imbalance.max()),
        }
        if self._ranks > 1:
            metrics["experts/busiest_rank"] = _busiest_rank(counts, sizes, self._ranks)
        return metrics

    def stop(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()


def _named_routers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the routers of a model that transformers knows, by name, if they have ``num_experts``."""
    kinds = tuple(kind for kind, _ in routers_of(module))
    return {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, kinds) and isinstance(getattr(child, "num_experts", None), int)
    }


def _busiest_rank(counts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], ranks: int) -> float:
    """Return the tokens of a layer's busiest rank over the mean of its ranks, averaged over layers.

    ``counts`` are ``[layers, most experts]``, ``sizes`` the layers' numbers of experts, of which every rank
    holds as many neighbours. Counts ``[[3, 1, 0, 0]]`` on two ranks give 2.0.
    """
    shares = []
    for of_layer, size in zip(counts, sizes, strict=True):
        of_ranks = of_layer[:size].reshape(ranks, -1).sum(axis=1)
        shares.append(of_ranks.max() / of_ranks.mean())
    return float(np.mean(shares))


def expert_load(module: nn.Module, group: Any = None) -> ExpertChoices | None:
    """Start to count a model's choices of experts; return None if transformers knows no routers in it."""
    choices = ExpertChoices(module, group)
    return choices if choices.names else None


class ExpertBias(Callback):
    """Balances experts without a loss by moving the routers' ``e_score_correction_bias`` in every step.

    If an expert is chosen more often than the mean in a step, over all ranks, its bias falls by ``rate``. If
    it is chosen less often, its bias rises by ``rate`` (arXiv:2408.15664; DeepSeek-V3 has 0.001). The
    callback logs ``train/experts/bias``, the largest absolute bias.

    Args:
        rate: the change of a bias per step.

    Raises:
        MisconfigurationException: when training starts, if a bias is missing or in half precision; and before
            the first optimizer step, if no choice was counted.
    """

    def __init__(self, rate: float = 1e-3) -> None:
        super().__init__()
        self.rate = real_number(rate, "rate", above=0.0, advice="DeepSeek-V3 has 0.001.")
        self._choices: ExpertChoices | None = None
        self._biases: list[Tensor] = []
        self._counted = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the biases and start to count choices."""
        self._choices = ExpertChoices(pl_module, stage_group(trainer.strategy))
        self._counted = False
        # Some models register the bias as a buffer, others as a parameter.
        tensors = [*pl_module.named_buffers(), *pl_module.named_parameters()]
        biases = {name: tensor for name, tensor in tensors if name.rpartition(".")[2] == _BIAS}
        self._biases = [_bias_of(name, biases) for name in self._choices.names]

        half = [name for name, bias in biases.items() if bias.dtype.itemsize < 4]
        several = getattr(trainer.strategy, "pipeline_parallel_size", 1) > 1  # a stage may have no experts
        if half or not (self._biases or several):
            came = f"{half[0]} is {biases[half[0]].dtype}" if half else "the model has no known routers"
            raise MisconfigurationException(
                f"ExpertBias moves each router's {_BIAS} in small steps, and {came}; wanted fp32. "
                + ("Set its .data to fp32." if half else "Leave ExpertBias out.")
            )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Move the biases according to the choices of the step."""
        if self._choices is None or not self._biases:
            return

        counts = self._choices.take()
        if not self._counted and not bool(counts.any()):
            raise MisconfigurationException(
                "ExpertBias counted no choice of a router in the first step: compiled layers and CUDA graphs "
                "run no hooks. Train without them, or use router_balance='sequence'. "
                f"{see('experts')}"
            )
        self._counted = True

        with torch.no_grad():
            for bias, layer_counts in zip(self._biases, counts, strict=True):
                chosen = layer_counts[: bias.numel()]
                # The sign of mean - chosen; times the number of experts, it is exact in int64.
                direction = torch.sign(chosen.sum() - chosen * len(chosen))
                change = (self.rate * direction).to(bias.device, bias.dtype).view(bias.shape)
                if isinstance(bias, DTensor):  # a parameter that FSDP2 shards
                    # Every rank has the same change, so that none has to send it (src_data_rank=None).
                    change = distribute_tensor(change, bias.device_mesh, bias.placements, src_data_rank=None)
                bias.add_(change)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the largest bias when the Trainer logs."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set outside __init__
        if not every or not self._biases or accumulates(trainer) or trainer.global_step % every:
            return

        whole = [bias.full_tensor() if isinstance(bias, DTensor) else bias for bias in self._biases]
        largest = torch.stack([bias.abs().max().float() for bias in whole]).max()
        metrics = {"train/experts/bias": float(largest)}
        record(trainer, metrics, logged=metrics)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks."""
        if self._choices is not None:
            self._choices.stop()
        self._choices = None
        self._biases = []


def _bias_of(router: str, biases: dict[str, Tensor]) -> Tensor:
    """Return the bias inside a router or, if it has none, inside the module that holds the router."""
    for owner in (router, router.rpartition(".")[0]):
        for name, bias in biases.items():
            if name.startswith(f"{owner}."):
                return bias
    raise MisconfigurationException(
        f"ExpertBias moves each router's {_BIAS}, and {router} has none. Use router_balance='sequence'."
    )
