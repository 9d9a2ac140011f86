"""Lightning's precision hooks -> FP8 layers, the context in which they run in FP8, and aligned packs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_thd._checks import whole_number
from lightning_thd._find import recipe_of
from lightning_thd._pages import see
from lightning_thd.alignment import Alignment, Layout
from lightning_thd.batch.thd_batch import Packed
from lightning_thd.data.trainer_link import alignment_of
from lightning_thd.flops.backward import checkpointing
from lightning_thd.parallel.across_ranks import group_size, stage_group
from lightning_thd.precision.convert import (
    KEEP,
    Converted,
    autocast,
    check_strategy,
    check_weights,
    device_of,
    is_converted,
    replace_layers,
)
from lightning_thd.precision.recipes import check_device, resolve


class FP8Precision(Precision):
    """Trains in FP8 (or FP4) the layers that ``convert_linear`` converts, the rest in bf16, on aligned packs.

    Use it as ``Trainer(plugins=FP8Precision("blockwise"))``. With ``engine="te"`` (Transformer Engine)
    ``recipe`` is "delayed", "current", "blockwise", "mxfp8", "nvfp4" or an object of
    ``transformer_engine.common.recipe``. With ``engine="torchao"`` it is "tensorwise" (also "current"),
    "rowwise", "rowwise_with_gw_hp" or a ``Float8LinearConfig``. ``weights_dtype`` is torch.bfloat16 or
    torch.float32. The other arguments are those of ``convert_linear``.
    """

    def __init__(
        self,
        recipe: Any = "current",
        *,
        engine: str = "te",
        weights_dtype: torch.dtype = torch.bfloat16,
        keep: str | Iterable[str] = KEEP,
        convert: Callable[[str, nn.Linear], bool] | None = None,
        min_features: int = 0,
        emulate: bool = False,
    ) -> None:
        if weights_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"weights_dtype={weights_dtype} cannot be combined with FP8: use torch.bfloat16, or "
                "torch.float32 for weights in full precision."
            )

        self.keep = (keep,) if isinstance(keep, str) else tuple(keep)
        self.recipe = resolve(recipe, engine, emulate=emulate)
        self.precision = f"fp8-{engine}-{self.recipe.name}"  # type: ignore[assignment]  # a name of our own
        self.weights_dtype = weights_dtype
        self.convert = convert
        self.min_features = whole_number(min_features, "min_features")

        self.converted: Converted | None = None
        self._rules: Alignment | None = self.alignment()  # the multiples for lengths and slots of packs
        self._group: Any = None  # the ranks that share delayed scaling's statistics
        self._device_type = "cuda"
        self._recomputes = False  # whether the backward pass recomputes Transformer Engine's layers
        self._module: nn.Module | None = None  # the module whose layers have delayed scaling's statistics

    def alignment(
        self, cp: int = 1, tp: int = 1, sequence_parallel: bool = False, *, layout: Layout = "dual_chunk"
    ) -> Alignment:
        """Return the recipe's multiples for packs; the data module combines them with the strategy's."""
        return self.recipe.alignment(cp=cp, tp=tp, sequence_parallel=sequence_parallel, layout=layout)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast a module to ``weights_dtype`` and convert its layers, in place; skip converted modules."""
        strategy = getattr(getattr(module, "_trainer", None), "strategy", None)
        check_strategy(strategy, self.recipe)
        self._module = module
        if self._is_converted(module):
            return module

        self._rules = alignment_of(strategy, self)
        # All ranks share statistics, because the ranks of a data or context axis have the same layers.
        self._group = dist.group.WORLD if group_size(strategy and stage_group(strategy)) > 1 else None
        device = torch.device(getattr(strategy, "root_device", None) or device_of(module))
        check_device(self.recipe, device)
        check_weights(module)
        self._device_type = device.type

        module.to(dtype=self.weights_dtype)
        self.converted = replace_layers(
            module, self.recipe, keep=self.keep, convert=self.convert, min_features=self.min_features
        )
        self._check_converted(module)
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors and modules are created in ``weights_dtype``."""
        return _default_dtype(self.weights_dtype)

    module_init_context = tensor_init_context

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the FP8 context of a training step; all ranks share delayed scaling's statistics."""
        return self._region(self._group)

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        """Enter the FP8 context of an evaluation step, which updates no statistics and runs no collective."""
        with self._region(None):
            yield

    test_step_context = predict_step_context = val_step_context

    def backward(self, tensor: Tensor, model: Any, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass, in the FP8 context if it recomputes layers, which else would run in bf16."""
        with ExitStack() as stack:
            if self._recomputes:
                stack.enter_context(autocast(self.recipe))
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point inputs, and check that the FP8 kernels can run the batch."""
        self._check_batch(data)
        return apply_to_collection(data, function=_in_dtype, dtype=Tensor, dst_type=self.weights_dtype)

    def convert_output(self, data: Any) -> Any:
        """Cast floating-point outputs to the default dtype."""
        return apply_to_collection(data, function=_in_dtype, dtype=Tensor, dst_type=torch.get_default_dtype())

    def state_dict(self) -> dict[str, Any]:
        """Return delayed scaling's scales and amax histories per layer; other recipes have no state."""
        states = {name: layer.get_fp8_meta_tensors() for name, layer in self._layers_with_history()}
        return {name: state for name, state in states.items() if state is not None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the statistics of delayed scaling into the layers that have the saved names."""
        for name, layer in self._layers_with_history():
            if name in state_dict:
                layer.fp8_meta["num_gemms"] = 1  # the next line allocates tensors of this size
                layer.init_fp8_meta_tensors(self.recipe.config)
                layer.reset_fp8_meta_tensors(state_dict[name])

    def _layers_with_history(self) -> Iterator[tuple[str, Any]]:
        """Yield the layers, by name, that hold statistics of earlier steps."""
        if not self.recipe.has_history or self._module is None:
            return
        for name, child in self._module.named_modules():
            if is_converted(child):
                yield name, child

    def _region(self, group: Any) -> AbstractContextManager[Any]:
        """Return the contexts of a step; the ranks of ``group`` share statistics, None updates none."""
        stack = ExitStack()
        stack.enter_context(_default_dtype(self.weights_dtype))
        if not self.recipe.emulate:  # emulation may run on a CPU, on which torchao ignores autocast
            stack.enter_context(torch.autocast(self._device_type, dtype=torch.bfloat16))
        if self.recipe.engine == "te":
            stack.enter_context(autocast(self.recipe, group))
        return stack

    def _is_converted(self, module: nn.Module) -> bool:
        """Return whether a module has FP8 layers already; raise if ``convert_linear`` made others."""
        if not any(is_converted(child) for child in module.modules()):
            return False
        if self.converted is None:  # not by this plugin
            other = recipe_of(module)
            if other is not None and (other.engine, other.name) != (self.recipe.engine, self.recipe.name):
                raise MisconfigurationException(
                    f"The model was converted to {other.engine} {other.name!r} by convert_linear, and "
                    f"FP8Precision is set to {self.recipe.engine} {self.recipe.name!r}, so packs and MFU "
                    "would be wrong. Give both the same recipe, or leave convert_linear out."
                )
            self.converted = Converted()
        self._check_converted(module)
        return True

    def _check_converted(self, module: nn.Module) -> None:
        """Raise if no layer is in FP8, or if checkpointing would change statistics; note if it recomputes."""
        if not any(is_converted(child) for child in module.modules()):
            kept = {} if self.converted is None else self.converted.kept
            reasons = "; ".join(f"{name} {reason}" for name, reason in list(kept.items())[:3])
            raise MisconfigurationException(
                f"FP8Precision converted no layer of {type(module).__name__}, so nothing would run in FP8: "
                f"{reasons or 'it has no nn.Linear'}. Change keep= or min_features=, or train in bf16. "
                f"{see('fp8')}"
            )

        policy, _ = checkpointing(module)
        self._recomputes = policy != "none" and self.recipe.engine == "te"
        if self._recomputes and self.recipe.has_history:
            raise MisconfigurationException(
                "recipe='delayed' with activation checkpointing would update every layer's statistics twice. "
                "Use recipe='current', which has no statistics, or switch checkpointing off."
            )

        if self.recipe.engine == "torchao" and not self.recipe.emulate:
            rank_zero_info(
                "torchao's FP8 is slower than bf16 unless compiled: call layer.compile(dynamic=False) on "
                "every decoder layer, and give all packs one length (THDDataModule pads to its capacity)."
            )

    def _check_batch(self, data: Any) -> None:
        """Check the slots of a batch's packs, because a kernel's own error would not say what to do."""
        if isinstance(data, Packed):  # the slots of a shard were checked before the pack was cut
            rows = [pack.input_ids for pack in data.packs if pack.boundaries.ranks == 1]
        else:
            ids = data.get("input_ids") if isinstance(data, Mapping) else getattr(data, "input_ids", None)
            rows = [ids] if isinstance(ids, Tensor) else []

        for ids in rows:
            assert self._rules is not None
            self._rules.check(ids.numel())


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create floating-point tensors in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _in_dtype(tensor: Tensor, *, dst_type: torch.dtype) -> Tensor:
    """Return a floating-point tensor in a dtype, and any other tensor as it is."""
    if tensor.is_floating_point():
        return tensor.to(dst_type)
    return tensor
