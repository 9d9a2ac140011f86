"""Padded rows [B, N] of TRL's pair and group trainers -> one pack for the model, and its outputs as rows.

These trainers' losses compare rows, so only the model runs on a pack. Data, losses and metrics stay TRL's.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_thd._checks import flags
from lightning_thd._find import unwrapped
from lightning_thd._versions import TRL_WITH_LOGPROBS
from lightning_thd.batch import THDBatch
from lightning_thd.batch.collate import padded_on_host
from lightning_thd.batch.keys import IGNORE_INDEX
from lightning_thd.batch.thd_batch import collate_checked
from lightning_thd.data.read.files import is_paths
from lightning_thd.flops import FlopsModel
from lightning_thd.integrations.hf_cuts import report_cut_pairs
from lightning_thd.integrations.hf_data import TrainerBase
from lightning_thd.integrations.hf_options import choose_thd, refuse_attention, refuse_engines
from lightning_thd.loss.arguments import is_dtensor
from lightning_thd.models.announce import run_as_pack
from lightning_thd.models.pack import BOUNDARIES, current_pack
from lightning_thd.models.switching import NAME, choose_attention

# TRL's trainers whose rows go into one pack; they are named, so that TRL need not be imported.
ROW_TRAINERS = frozenset({"DPOTrainer", "RewardTrainer", "GRPOTrainer"})
# Arguments of a model's call that this file packs, replaces or leaves out, and those that it passes on.
_OF_ROWS = frozenset({"input_ids", "attention_mask", "labels", "fused_lm_head", "use_cache", "margin"})
_PASSED_ON = frozenset({"output_router_logits", "num_items_in_batch", "return_dict"})

_BATCH_IS_PACK = "a batch of per_device_train_batch_size rows is one pack"
# Arguments of packed_trainer that only other trainers take, and why.
_NOT_FOR_ROWS = {
    "capacity": _BATCH_IS_PACK,
    "data_kwargs": _BATCH_IS_PACK,
    "needs_boundaries": "rows of TRL always run as a pack whose boundaries are known",
    "router_balance": "TRL averages over pairs or groups, and adds the model's own balancing loss",
}

# Options that are refused if set, and why. pad_to_multiple_of has no effect; all others keep TRL's meaning.
REFUSED_FOR_ROWS: dict[str, str] = {
    "padding_free": "packs by itself, before packed_trainer does",
    "use_liger_kernel": "replaces TRL's loss by Liger's over padded rows. For its layers only, call "
    "apply_liger_kernel_to_<family>(model=model, fused_linear_cross_entropy=False)",
    "torch_compile": "compiles the model for rows of one shape, but every pack has another shape",
    "deepspeed": "runs the model in its own engine",
    "neftune_noise_alpha": "scales its noise by the row's length, which would be the whole pack's",
    "use_transformers_continuous_batching": "generates with an attention that packs by itself",
    "use_transformers_paged": "generates with an attention that packs by itself",
}


def refuse_old_rows(trainer_class: type, name: str) -> None:
    """Refuse a trainer of pairs or groups from a TRL that takes log-probabilities from logits."""
    if name == "RewardTrainer" or _has_fused_head():
        return
    import trl

    raise ValueError(
        f"packed_trainer({trainer_class.__name__}) needs TRL {TRL_WITH_LOGPROBS} or newer, and "
        f"{trl.__version__} is installed, whose trainer makes the logits of padded rows. Upgrade TRL, or "
        "write the loop with prepare_thd and a loss of causal_lm_logprobs, as examples/rl_logprobs.py does."
    )


def _has_fused_head() -> bool:
    from trl import trainer

    return hasattr(trainer, "add_fused_lm_head")


class PackedRowsMixin(TrainerBase):  # type: ignore[misc]
    """Makes a TRL trainer's models run padded rows as packs (``pack_rows``); see ``packed_trainer``."""

    def __init__(
        self,
        *args: Any,
        peak: Literal["auto", "measure"] | float | None = None,
        flops_model: FlopsModel | None = None,
        share_prefixes: bool = False,
        **kwargs: Any,
    ) -> None:
        flags(share_prefixes=share_prefixes)
        self._share_prefixes = share_prefixes
        for name, why in _NOT_FOR_ROWS.items():
            if name in kwargs:
                raise TypeError(f"{type(self).__name__} got {name}, but {why}. Leave it out.")
        if flops_model is not None and peak is None:
            raise ValueError(
                "flops_model= counts for the throughput that peak= logs, but peak is None. Pass peak='auto'."
            )
        arguments = self._by_name(args, kwargs)
        self._refuse_paths(arguments)
        self._refuse_other_attention(arguments)
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, nn.Module):
                for model in argument.modules():
                    _unpack_rows(model)  # TRL wraps the forward of each model, also one from another trainer
        super().__init__(*args, **kwargs)

        refuse_engines(self)
        self._refuse_what_rows_cannot()
        self._report_cuts(arguments)
        self._pack_models()
        if peak is not None:
            self._measure_throughput(peak, flops_model)

    def _measure_throughput(
        self, peak: Literal["auto", "measure"] | float, flops_model: FlopsModel | None
    ) -> None:
        """Add a callback that logs throughput and MFU of the packs that the models run."""
        from lightning_thd.integrations.hf_callback import ThroughputCallback

        callback = ThroughputCallback(peak=peak, flops_model=flops_model)
        callback.reference = getattr(self, "ref_model", None)
        callback.add_to(self)
        callback.counts_calls = False  # a call has padded rows; _run_pack counts the pack
        unwrapped(self.accelerator.unwrap_model(self.model))._thd_throughput = callback

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the base class's constructor by their names."""
        names = list(inspect.signature(super().__init__).parameters)
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _refuse_paths(self, arguments: dict[str, Any]) -> None:
        """Refuse paths in place of datasets, which only SFT and transformers' Trainer read."""
        for name in ("train_dataset", "eval_dataset"):
            source = arguments.get(name)
            sources = source.values() if isinstance(source, Mapping) else (source,)
            if any(map(is_paths, sources)):
                raise TypeError(
                    f"{type(self).__name__} got a path as {name}, but reads no files of pairs or prompts. "
                    "Pass datasets.load_dataset('json', data_files=path, split='train')."
                )

    def _report_cuts(self, arguments: dict[str, Any]) -> None:
        """Report the pairs that TRL's ``max_length`` cuts or has left out."""
        for stage in ("train", "eval"):
            given = arguments.get(f"{stage}_dataset")
            prepared = getattr(self, f"{stage}_dataset")
            if given is None or prepared is None:
                continue
            if isinstance(given, Mapping):
                for name, part in given.items():
                    report_cut_pairs(name, part, prepared[name], self.args)
            else:
                report_cut_pairs(stage, given, prepared, self.args)

    def _refuse_other_attention(self, arguments: dict[str, Any]) -> None:
        """Refuse models with another attention, as packed_trainer does; TRL builds named ones with "thd"."""
        for name in ("model", "ref_model"):
            model = arguments.get(name)
            if isinstance(model, str) and arguments.get("args") is not None:
                choose_thd(arguments["args"])
            elif isinstance(model, nn.Module):
                refuse_attention(model)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a step as the base class does, unless the model was left without DDP."""
        refuse_without_ddp(self.accelerator.distributed_type, model)
        return super().training_step(model, *args, **kwargs)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self._pack_models()  # DPOTrainer.__init__ may call this, before this class packs the models
        return super()._precompute_ref_logps(*args, **kwargs)

    def _pack_models(self) -> None:
        """Let the model and its reference run rows as packs."""
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                inner = unwrapped(self.accelerator.unwrap_model(model))
                pack_rows(inner, share_prefixes=self._share_prefixes)

    def _refuse_what_rows_cannot(self) -> None:
        """Refuse options that are wrong for packs of rows, and say which option has no effect."""
        for name, why in REFUSED_FOR_ROWS.items():
            value = getattr(self.args, name, None)
            if value:
                option = f"{type(self.args).__name__}({name}={value!r})"
                raise ValueError(f"{option} {why}. Leave it at its default.")
        multiple = getattr(self.args, "pad_to_multiple_of", None)
        if multiple:
            rank_zero_info(f"pad_to_multiple_of={multiple!r} has no effect on packs, which hold no padding.")


def refuse_without_ddp(distributed_type: Any, model: nn.Module) -> None:
    """Refuse a job under DDP whose model is not wrapped, so that each rank would train by itself."""
    is_ddp = str(getattr(distributed_type, "value", distributed_type)).startswith("MULTI_")
    is_wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    if not is_ddp or is_wrapped or any(is_dtensor(weight) for weight in model.parameters()):
        return
    raise ValueError(
        f"{type(model).__name__} runs without DistributedDataParallel, so every rank would train by itself. "
        "Accelerate takes a model that evaluate() has prepared for one that is ready to train. Call train() "
        "before evaluate(), or make another trainer for it."
    )


def pack_rows(model: Any, *, share_prefixes: bool = False) -> None:
    """Make a transformers model run padded rows as one pack, in place; it still returns padded rows.

    With ``share_prefixes``, the common prefix of rows runs once. Only TRL's calls for log-probabilities
    (``fused_lm_head=True``) and a sequence classifier's calls with an ``attention_mask`` run as packs. All
    other calls, such as generation, run on padded rows, with the attention that the model had before. If that
    was "thd", they run "sdpa", or "eager" if the model knows no "sdpa".
    """
    if getattr(model, "_thd_packs_rows", False):
        return
    padded_attention = model.config._attn_implementation
    if padded_attention == NAME:
        padded_attention = _attention_of_rows(model)
    model.set_attn_implementation(NAME)
    model._thd_packs_rows = True
    model._thd_shares_prefixes = share_prefixes
    model._thd_padded_attention = padded_attention
    model._thd_padded_forward = model.forward

    signature = inspect.signature(model.forward)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward_rows(self, *args, **kwargs)

    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]  # generation reads it
        parameters=[itself, *signature.parameters.values()]
    )
    model.forward = MethodType(forward, model)  # a bound method, so that a copy of the model runs the copy


def _attention_of_rows(model: Any) -> str:
    """Return the attention that a model built with "thd" runs on padded rows, and switch to it."""
    try:
        model.set_attn_implementation("sdpa")
    except (ImportError, ValueError):
        model.set_attn_implementation("eager")
    attention: str = model.config._attn_implementation
    return attention


def _unpack_rows(model: Any) -> None:
    """Undo ``pack_rows``, if it was called on the model."""
    if model.__dict__.get("_thd_packs_rows"):
        model.forward = model._thd_padded_forward
        model._thd_packs_rows = False
        model._thd_throughput = None
        model.set_attn_implementation(model._thd_padded_attention)


def _forward_rows(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a model's call for log-probabilities or classes as a pack, and any other on padded rows."""
    # The call has a THDBatch's arguments, or is that of causal_lm_loss.
    if kwargs.get(BOUNDARIES) is not None or current_pack() is not None:
        return model._thd_padded_forward(*args, **kwargs)
    classifies = "ForSequenceClassification" in type(model).__name__
    if kwargs.get("fused_lm_head") or (classifies and kwargs.get("attention_mask") is not None):
        return _run_pack(model, model._thd_padded_forward, kwargs)
    with _attention(model, model._thd_padded_attention):
        return model._thd_padded_forward(*args, **kwargs)


def _run_pack(model: Any, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Run a call's rows as one pack; return values of tokens as rows ``[B, N - 1]``, classes ``[B, ...]``."""
    inputs = {name: value for name, value in arguments.items() if value is not None}
    refused = [name for name in inputs if name not in _OF_ROWS | _PASSED_ON]
    if inputs.get("use_cache"):
        refused = refused or ["use_cache=True"]
    if refused:
        raise ValueError(
            f"{type(model).__name__} got {', '.join(refused)} beside padded rows, and packed_trainer packs "
            "only rows of text. Use TRL's trainer as it is."
        )

    rows = inputs["input_ids"]
    mask = inputs["attention_mask"] if "attention_mask" in inputs else torch.ones_like(rows)
    passed_on = {name: inputs[name] for name in _PASSED_ON if name in inputs}
    batch = _packed(model, rows, mask, inputs.get("labels"), passed_on)
    throughput = getattr(model, "_thd_throughput", None)
    if throughput is not None:
        throughput.count(model, batch)

    if not inputs.get("fused_lm_head"):
        return run_as_pack(model, forward, batch, **passed_on)
    return _run_log_probs(model, forward, batch, mask, passed_on)


def _run_log_probs(
    model: Any, forward: Callable[..., Any], batch: THDBatch, mask: Tensor, passed_on: dict[str, Any]
) -> Any:
    """Run a pack for log-probabilities; values of tokens come back as rows ``[B, N - 1]``."""
    slots, targets, _ = batch.prediction_rows
    head_input: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if slots is not None:  # a slot has one row for each of its next tokens
        head_input = _hidden_at(model, slots)
    with head_input:
        output = run_as_pack(
            model, forward, batch, **passed_on, fused_lm_head=True, shift_labels=targets[None]
        )

    for name, value in list(output.items()):
        if isinstance(value, Tensor) and value.shape == (1, len(targets)):
            values = batch.boundaries.of_tokens(value[0])
            output[name] = _as_rows(values, mask)[:, :-1]  # TRL has no column for the last token
    if not batch.boundaries.rows_are_tokens:  # the model's mean counts a prediction of several rows once
        num_scored = (batch.token_targets != IGNORE_INDEX).sum().clamp(min=1)
        output["loss"] = -output["log_probs"].sum() / passed_on.get("num_items_in_batch", num_scored)
    return output


def _as_rows(values: Tensor, mask: Tensor) -> Tensor:
    """Arrange the values of a mask's tokens as rows ``[B, N]``, with 0 elsewhere, without a device read."""
    place = (mask.flatten().cumsum(0) - 1).clamp(min=0)
    return values.index_select(0, place).view(mask.shape).masked_fill(~mask.bool(), 0)


def _packed(model: Any, rows: Tensor, mask: Tensor, labels: Tensor | None, options: Any) -> THDBatch:
    """Pack padded rows; with shared prefixes, each distinct prefix once."""
    if not model._thd_shares_prefixes:
        return THDBatch.from_padded(rows, mask, labels)
    balances = getattr(model.config.get_text_config(), "output_router_logits", False)
    if options.get("output_router_logits", balances):
        raise ValueError(
            f"{type(model).__name__} balances its experts over the tokens of a batch (output_router_logits), "
            "but shared prefixes count once. Set router_aux_loss_coef=0.0 or share_prefixes=False."
        )

    has_labels = labels is not None
    ids, is_real, row_labels = padded_on_host(rows, mask, rows if labels is None else labels, "labels")
    samples = []
    for i, real in enumerate(is_real):
        sample = {"input_ids": ids[i][real].numpy()}
        if has_labels:
            sample["labels"] = row_labels[i][real].numpy()
        samples.append(sample)
    return collate_checked(samples, share_prefixes=True).to(rows.device)


@contextmanager
def _hidden_at(model: Any, slots: Tensor) -> Generator[None]:
    """Let the model's head read only the hidden states of some slots, in their order."""

    def select(_: nn.Module, __: Any, output: Any) -> Any:
        output["last_hidden_state"] = output["last_hidden_state"].index_select(1, slots)
        return output

    handle = model.base_model.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _attention(model: nn.Module, name: str) -> Generator[None]:
    """Run the parts of a model that have "thd" with another attention inside this context."""
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if torch.is_grad_enabled() and recomputes and model.training:
        raise ValueError(
            f"{type(model).__name__} was called on padded rows, but not for log-probabilities, with "
            "gradients and gradient checkpointing. Call it under torch.no_grad()."
        )

    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    chosen = [config for config in configs if getattr(config, "_attn_implementation", None) == NAME]

    for config in chosen:
        choose_attention(config, name)
    try:
        yield
    finally:
        for config in chosen:
            choose_attention(config, NAME)
