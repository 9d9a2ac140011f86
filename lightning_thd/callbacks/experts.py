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
from lightning_thd._static import only_looking, shapes_are_static
from lightning_thd.callbacks.seen import kept_slots
from lightning_thd.parallel.across_ranks import communication_device, group_size, stage_group
from lightning_thd.parallel.experts import expert_ranks
from lightning_thd.parallel.routers import routers_of

_BIAS = "e_score_correction_bias"


class ExpertChoices:
    """Counts, by hooks on the routers, how many real tokens choose each expert; counts stay on the device."""

    # Only forward passes in training are counted. Compiled layers and CUDA graphs run no hooks.

    def __init__(self, module: nn.Module, group: Any = None) -> None:
        kinds = tuple(kind for kind, _ in routers_of(module))
        found = [(n, x) for n, x in module.named_modules() if kinds and isinstance(x, kinds)]
        routers = {n: x for n, x in found if isinstance(getattr(x, "num_experts", None), int)}
        self.names = [*routers]
        self.group, self.device = group, next((p.device for p in module.parameters()), torch.device("cpu"))
        self._sizes: list[int] = [x.num_experts for x in routers.values()]  # type: ignore[misc]
        self._ranks = expert_ranks(module)
        self._counts: Tensor | None = None
        self._handles = [
            router.register_forward_hook(only_looking(functools.partial(self._count, layer)))
            for layer, router in enumerate(routers.values())
        ]
        self._mask: Any = None  # the attention_mask of the model's running call
        models = [x for x in module.modules() if routers and hasattr(type(x), "get_input_embeddings")]
        look = only_looking(self._look)
        self._handles += [x.register_forward_pre_hook(look, with_kwargs=True) for x in models]

    def _look(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._mask = kwargs.get("attention_mask")

    def _count(self, layer: int, router: nn.Module, args: Any, output: Any) -> None:
        # Skip recomputation in the backward pass, which would count the same choices twice.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return
        if not router.training or shapes_are_static() or not isinstance(output, tuple):
            return
        chosen = next((x for x in output if isinstance(x, Tensor) and x.dtype == torch.int64), None)
        if chosen is None or chosen.ndim != 2:
            return
        counts = self._tensor(chosen.device)
        # A monitor of models without packs does not load attention.
        from lightning_thd.models.pack import current_scope

        scope = current_scope()
        real = None if scope is None or scope.pack is None else scope.pack.real_slots
        mask = self._mask if real is None else None
        if isinstance(mask, Tensor) and mask.numel() == len(chosen):  # padded rows
            real = kept_slots(mask).flatten()
        ones = torch.ones_like(chosen) if real is None else real[:, None].expand_as(chosen).to(chosen.dtype)
        counts[layer].scatter_add_(0, chosen.flatten(), ones.flatten())

    def _tensor(self, device: torch.device) -> Tensor:
        if self._counts is None:
            shape = len(self._sizes), max(self._sizes, default=0)
            self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        return self._counts

    def take(self) -> Tensor:
        """Add up all ranks' choices since the last call, in a collective: ``[layers, most experts]``."""
        counts, several = self._tensor(self.device), group_size(self.group) > 1
        wire = communication_device(self.group, counts.device) if several else counts.device
        found = counts.to(wire, copy=True)
        counts.zero_()
        if several:
            dist.all_reduce(found, group=self.group)
        return found

    def close(self) -> dict[str, float]:
        """Return the metrics of the choices since the last call, after a collective and a device read."""
        counts = self.take().cpu().numpy()
        counts, sizes = counts[ran := counts.any(axis=1)], np.array(self._sizes)[ran]
        if not ran.any():
            return {}
        busiest = counts.max(axis=1) * sizes / counts.sum(axis=1)
        metrics = {"experts/imbalance": float(busiest.mean()), "experts/worst_layer": float(busiest.max())}
        if self._ranks > 1:
            metrics["experts/busiest_rank"] = _busiest_rank(counts, sizes, self._ranks)
        return metrics

    def stop(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()


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
        named = [*pl_module.named_buffers(), *pl_module.named_parameters()]
        biases = {name: value for name, value in named if name.rpartition(".")[2] == _BIAS}
        self._biases, self._counted = [_bias_of(name, biases) for name in self._choices.names], False
        half = [name for name, value in biases.items() if value.dtype.itemsize < 4]
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
                "See docs/reference/messages.md#experts."
            )
        self._counted = True
        with torch.no_grad():
            for bias, row in zip(self._biases, counts, strict=True):
                chosen = row[: bias.numel()]
                move = self.rate * torch.sign(chosen.sum() - chosen * len(chosen))
                whole = move.to(bias.device, bias.dtype).view(bias.shape)
                if isinstance(bias, DTensor):  # a parameter that FSDP2 shards
                    whole = distribute_tensor(whole, bias.device_mesh, bias.placements, src_data_rank=None)
                bias.add_(whole)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the largest bias when the Trainer logs."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        steps = self._biases and not trainer.fit_loop._should_accumulate()
        if every and steps and trainer.global_step % every == 0:
            parts = [b.full_tensor() if isinstance(b, DTensor) else b for b in self._biases]
            value = float(torch.stack([part.abs().max().float() for part in parts]).max())
            trainer._logger_connector._callback_metrics["train/experts/bias"] = torch.tensor(value)
            trainer._logger_connector.log_metrics({"train/experts/bias": value})  # type: ignore[dict-item]  # floats work

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks."""
        if self._choices is not None:
            self._choices.stop()
        self._choices, self._biases = None, []


def _bias_of(router: str, biases: dict[str, Tensor]) -> Tensor:
    for place in (router, router.rpartition(".")[0]):
        if found := [bias for name, bias in biases.items() if name.startswith(f"{place}.")]:
            return found[0]
    raise MisconfigurationException(
        f"ExpertBias moves each router's {_BIAS}, and {router} has none. Use router_balance='sequence'."
    )
