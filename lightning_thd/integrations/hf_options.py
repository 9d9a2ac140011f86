"""Options of transformers' and TRL's Trainers -> which of them packed_trainer supports or refuses."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd._find import unwrapped
from lightning_thd._imports import require
from lightning_thd._pages import see
from lightning_thd._private import private
from lightning_thd.models.switching import NAME

# Options that the base class or packed_trainer reads, with their usual meaning.
_HONOURED = """
    output_dir num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
    warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules
    gradient_accumulation_steps max_grad_norm label_smoothing_factor bf16 fp16 bf16_full_eval
    fp16_full_eval tf32 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode
    torch_empty_cache_steps logging_strategy logging_steps logging_first_step log_on_each_node
    logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm
    report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy
    eval_steps eval_delay prediction_loss_only eval_on_start save_only_model save_strategy save_steps
    save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo
    hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model
    greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed
    data_seed use_cpu parallelism_config dataloader_num_workers dataloader_pin_memory
    dataloader_prefetch_factor ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers
    ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config skip_memory_metrics debug do_train do_eval
    do_predict resume_from_checkpoint local_rank model_init_kwargs trust_remote_code
    router_aux_loss_coef chat_template_path dataset_text_field dataset_kwargs dataset_num_proc eos_token
    max_length truncation_mode shuffle_dataset completion_only_loss assistant_only_loss activation_offloading
    use_liger_kernel liger_kernel_config
"""
HONOURED = frozenset(_HONOURED.split())

_IRRELEVANT = """
    per_device_train_batch_size per_device_eval_batch_size use_cache pad_token accelerator_config
    average_tokens_across_devices dataloader_persistent_workers remove_unused_columns length_column_name
    eval_accumulation_steps eval_use_gather_object packing_strategy pad_to_multiple_of
"""
IRRELEVANT = frozenset(_IRRELEVANT.split())
# Trainers change these themselves, so a changed value need not come from the user.
_SET_BY_TRAINERS = frozenset({"accelerator_config", "remove_unused_columns", "use_cache"})

_OFF = (False, None)
_PACKS = "packs by itself, before packed_trainer does. Set it to False"
# Name: (values that packs allow, why others are refused and what to do).
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "packing": (_OFF, _PACKS),
        "padding_free": (_OFF, _PACKS),
        "eval_packing": (_OFF, _PACKS),
        # TRL 1.7 to 1.14 calls the same loss "chunked_nll" if it makes logits of few tokens at a time.
        "loss_type": (
            ("nll", "chunked_nll", None),
            "is another loss. Use prepare_thd(loss_fn=loss.dft_loss) for 'dft'",
        ),
        "neftune_noise_alpha": ((None,), "scales its noise by the pack's length. Leave it at None"),
        "auto_find_batch_size": (_OFF, "halves a batch size, but a batch is a pack. Lower capacity"),
        "train_sampling_strategy": (("random", None), "orders rows, but packs are planned. Use 'random'"),
        "dataloader_drop_last": (_OFF, "drops a last batch of rows. Use data_kwargs={'tail': 'drop'}"),
        "dataloader_in_order": ((True, None), "mixes the packs of different steps. Leave it at True"),
        "dataloader_multiprocessing_context": ((None,), "starts workers in another way. Leave it at None"),
        "label_names": ((None, ["labels"], []), "names columns that packs do not take. Name labels 'labels'"),
        "eval_do_concat_batches": ((True, None), "wants predictions in batches of rows. Leave it at True"),
        "include_for_metrics": ((), "wants a loss of every batch of rows. Leave 'loss' out"),
        "batch_eval_metrics": (_OFF, "wants metrics of batches of rows. Leave it at False"),
        "deepspeed": ((None,), "has its own engine. Use fsdp, or Lightning's THDModelParallelStrategy"),
    }
)


def refuse_options(args: Any) -> None:
    """Refuse options of a ``TrainingArguments`` that packs would ignore, or that would change their loss.

    An option of transformers or TRL in none of the lists above is refused if it differs from its default.
    """
    for field in dataclasses.fields(args):
        name = field.name
        value = getattr(args, name)
        option = f"{type(args).__name__}({name}={value!r})"
        if name in REFUSED:
            allowed, why = REFUSED[name]
            is_refused = value not in allowed
            if name == "include_for_metrics":  # a list of which only one entry is refused
                is_refused = "loss" in (value or ())
            if is_refused:
                raise ValueError(f"{option} {why}.")
        elif name in HONOURED or name in _SET_BY_TRAINERS or not _is_changed(args, field):
            continue
        elif name not in IRRELEVANT:
            raise ValueError(
                f"{option}: packed_trainer does not know this option and cannot say what it does to packs. "
                "Leave it at its default."
            )
        elif value is not None:  # TRL turns pad_to_multiple_of="auto" into None
            rank_zero_info(f"{option} has no effect on packs.")


# Liger's losses. Both make a mean over the row of slots.
_LIGERS_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")


def leave_out_ligers_losses(args: Any) -> None:
    """Keep Liger from replacing the model's loss, because packs have a loss of their own; keep its layers."""
    config = getattr(args, "liger_kernel_config", None) or {}
    if not getattr(args, "use_liger_kernel", False):
        if config:
            raise ValueError(
                f"{type(args).__name__}(liger_kernel_config={config!r}) without use_liger_kernel=True would "
                "have no effect. Set use_liger_kernel=True, or leave both out."
            )
        return
    if any(config.get(name) for name in _LIGERS_LOSSES):
        rank_zero_info(f"liger_kernel_config={config!r}: the loss of packs takes the place of Liger's.")
    args.liger_kernel_config = {**config, **dict.fromkeys(_LIGERS_LOSSES, False)}


def refuse_ligers_gaps(args: Any, model: Any) -> None:
    """Refuse a model that Liger has no layers for, and names that it would leave out without a word."""
    if not getattr(args, "use_liger_kernel", False):
        return
    liger: Any = require("liger_kernel.transformers.monkey_patch", feature="use_liger_kernel=True")
    kind = getattr(unwrapped(model).config, "model_type", None)
    apply = liger.MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if apply is None:
        raise ValueError(
            f"{type(args).__name__}(use_liger_kernel=True): the installed liger-kernel has no layers for "
            f"model_type={kind!r}. Leave it at False."
        )

    layers = set(inspect.signature(apply).parameters) - {"model", *_LIGERS_LOSSES}
    unknown = sorted(args.liger_kernel_config.keys() - layers - {*_LIGERS_LOSSES})
    if unknown:
        raise ValueError(
            f"liger_kernel_config has {unknown}, which Liger does not know for model_type={kind!r}; it takes "
            f"{sorted(layers)}."
        )


def refuse_engines(trainer: Any) -> None:
    """Refuse several devices in one process, DeepSpeed, and Accelerate's context and tensor parallelism."""
    devices = trainer.args.n_gpu
    if devices > 1:
        raise ValueError(
            f"The Trainer would run on {devices} GPUs from one process (nn.DataParallel), which cuts packs "
            "and their cu_seqlens in pieces. Start one process for each GPU with torchrun "
            f"--nproc-per-node={devices}, or show it one GPU with CUDA_VISIBLE_DEVICES=0."
        )

    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ValueError(f"Accelerate's configuration starts DeepSpeed, which {REFUSED['deepspeed'][1]}.")

    config = getattr(trainer.accelerator, "parallelism_config", None)
    if config is not None and (config.cp_enabled or config.sp_enabled or config.tp_enabled):
        raise ValueError(
            f"packed_trainer runs data parallel, but the accelerator has {config}. Set tp_size, cp_size and "
            "sp_size to 1 (Accelerate's context parallelism would let documents see each other), or use "
            "Lightning with THDModelParallelStrategy."
        )


def _is_changed(args: Any, field: dataclasses.Field[Any]) -> bool:
    """Return whether an option of transformers or TRL has a plain value as default, and differs from it."""
    owners = [base for base in type(args).__mro__ if field.name in inspect.get_annotations(base)]
    if not owners or owners[-1].__module__.partition(".")[0] not in ("transformers", "trl"):
        return False  # a user's own option
    return field.default is not dataclasses.MISSING and getattr(args, field.name) != field.default


def precision_of(args: Any) -> str:
    """Return the precision of ``TrainingArguments`` under Lightning's name."""
    if args.bf16:
        return "bf16-mixed"
    if args.fp16:
        return "16-mixed"
    return "32-true"


_CHATS = frozenset({"messages", "sharegpt", "alpaca"})  # kinds of records with an assistant


@contextmanager
def learned_from_paths(
    args: Any, kinds: Mapping[str, Callable[[], str | None]], eval_dataset: Any
) -> Generator[None]:
    """Refuse TRL's options about learned tokens that paths contradict, and hide one that they fulfil.

    A path's labels are made when it is read. TRL refuses ``assistant_only_loss=True`` for rows of ids, so it
    must not see the option while it prepares them.

    Args:
        args: the Trainer's arguments, or None.
        kinds: name of each argument that was a path -> a function that finds the kind of its records.
        eval_dataset: the Trainer's argument after its paths were read.
    """
    assistant_only = bool(getattr(args, "assistant_only_loss", False))
    completion_only = getattr(args, "completion_only_loss", None)
    if assistant_only or completion_only is not None:
        for name, kind in kinds.items():
            _refuse_learned(args, name, kind())

    hides = assistant_only and "train_dataset" in kinds
    if hides and eval_dataset is not None and not any(name.startswith("eval_dataset") for name in kinds):
        raise ValueError(
            f"{type(args).__name__}(assistant_only_loss=True): train_dataset is a path, of which only the "
            "assistant's tokens are learned anyway. But eval_dataset is no path, and TRL prepares both "
            "alike. Pass paths for both, or datasets for both."
        )
    if hides:
        args.assistant_only_loss = False
    try:
        yield
    finally:
        if hides:
            args.assistant_only_loss = True


def _refuse_learned(args: Any, name: str, kind: str | None) -> None:
    """Refuse options about learned tokens that the records of a path cannot fulfil."""
    holds = (
        f"{name} is a path to {kind!r} records" if kind not in (None, "ids") else f"{name} holds token ids"
    )
    if args.assistant_only_loss and kind not in _CHATS:
        raise ValueError(
            f"{type(args).__name__}(assistant_only_loss=True): {holds}, which have no assistant. Leave the "
            "option out. Of a path of conversations, only the assistant's tokens are learned anyway."
        )
    if args.completion_only_loss and kind != "prompt":
        raise ValueError(
            f"{type(args).__name__}(completion_only_loss=True): {holds}, which have no prompt and "
            "completion. Leave the option out."
        )
    if args.completion_only_loss is False and kind == "prompt":
        raise ValueError(
            f"{type(args).__name__}(completion_only_loss=False): {holds}, of which only completions are "
            "learned. Leave the option out, or pass a datasets.Dataset to learn prompts too."
        )


REPLACED = ("compute_loss", "evaluation_loop", *(f"get_{x}_dataloader" for x in ("train", "eval", "test")))
_SAMPLER = "transformers.Trainer._get_train_sampler"  # in the table of private names
_OWN_ORDER = _SAMPLER.rpartition(".")[2]
# Methods of Trainer that packs never call, and what to use instead.
UNUSED: Mapping[str, str] = MappingProxyType(
    {
        "prediction_step": "Define compute_loss() or evaluation_loop() in a subclass of packed_trainer(...)",
        _OWN_ORDER: "The plan decides the order. Give train_dataset= the rows that you would draw",
    }
)


def _unused() -> set[str]:
    private(_SAMPLER)  # under another name, an override of it would go unnoticed
    return {*UNUSED}


def refuse_unused(trainer_class: type, packed: type) -> None:
    """Refuse a class that overrides a method which ``packed``, one of its bases, never calls."""
    for base in trainer_class.__mro__[: trainer_class.__mro__.index(packed)]:
        for name in _unused() & vars(base).keys():
            raise ValueError(f"{base.__name__} has a {name}(), which packs never call. {UNUSED[name]}.")


def refuse_trainer(trainer_class: type, known: tuple[type, ...]) -> None:
    """Refuse a class that overrides a method above, or comes with TRL's training_step; ``known`` ones may."""
    for name in (*REPLACED, *_unused(), "training_step"):
        owner = next((base for base in trainer_class.__mro__ if name in base.__dict__), None)
        if owner is None or any(owner is base for known_class in known for base in known_class.__mro__):
            continue

        if owner.__module__.startswith("trl."):
            remedy = (
                "Its batches are pairs or groups of sequences: write the loop with prepare_thd and a loss of "
                "causal_lm_logprobs, as examples/rl_logprobs.py does."
            )
        elif name == "training_step":  # a user's own is given packs, and may call super()
            continue
        else:
            remedy = UNUSED.get(name, "Define it in a subclass of packed_trainer(...) instead") + "."

        raise ValueError(
            f"packed_trainer({trainer_class.__name__}): {owner.__name__} has a {name}() of its own. "
            f"packed_trainer replaces it or calls it with packs, so results would differ. {remedy}"
        )


def settings_for(model: str) -> Any:
    """Return the arguments that TRL makes for a model's name if it gets none."""
    trl = require("trl", feature="packed_trainer with the name of a model")
    return trl.SFTConfig(f"{model.rstrip('/').rpartition('/')[2]}-SFT")


def choose_thd(settings: Any) -> None:
    """Let TRL build a model that it gets by name with "thd", or refuse another attention in the arguments."""
    if not hasattr(settings, "model_init_kwargs"):
        raise TypeError(
            "The model is a name, which transformers' Trainer does not load. Pass "
            "AutoModelForCausalLM.from_pretrained(name, attn_implementation='thd')."
        )
    chosen = settings.model_init_kwargs or {}
    if isinstance(chosen, str):  # from a command line
        chosen = json.loads(chosen)
    attention = chosen.get("attn_implementation", NAME)
    if attention != NAME:
        raise ValueError(_other_attention(attention))
    settings.model_init_kwargs = {**chosen, "attn_implementation": NAME}


def refuse_attention(model: Any) -> None:
    """Refuse a model whose attention is not "thd"; objects without a config of transformers pass."""
    attention = getattr(getattr(model, "config", None), "_attn_implementation", NAME)
    if attention != NAME:
        raise ValueError(_other_attention(attention))


def _other_attention(attention: object) -> str:
    """Return the message for a model with another attention than "thd"."""
    return (
        f"The model runs attn_implementation={attention!r}, under which sequences of a pack may see "
        "each other. Call model.set_attn_implementation('thd') before you pass it (TRL: "
        "model_init_kwargs={'attn_implementation': 'thd'}). "
        f"{see('attention')}"
    )
