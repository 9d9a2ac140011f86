"""A model -> the same model, changed for a leak probe: random state, zero weights, dtype, attention, hooks.

Legend: T slots of a run, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_thd._find import text_config
from lightning_thd._modes import watch_operators
from lightning_thd._private import PrivateNameGone
from lightning_thd.models.pack import NOTES
from lightning_thd.models.switching import choose_attention


@contextmanager
def undisturbed(model: nn.Module, *, grad: bool) -> Generator[dict[nn.Module, bool]]:
    """Run the model in eval mode, uncompiled, with gradients if ``grad``; restore modes and random state.

    Yields the modes in which the modules were given.
    """
    training = {module: module.training for module in model.modules()}
    devices = _gpus(model)
    model.eval()
    try:
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
            seed_generators(model, 0)
            with torch.inference_mode(mode=False), torch.set_grad_enabled(grad):
                yield training
    finally:
        for module, flag in training.items():
            module.training = flag


def seed_generators(model: nn.Module, seed: int) -> None:
    """Seed the CPU's random numbers and those of the model's GPUs."""
    # torch.manual_seed would seed all GPUs, also those that are initialised later.
    for generator in (torch.default_generator, *(torch.cuda.default_generators[i] for i in _gpus(model))):
        generator.manual_seed(seed)


def _gpus(model: nn.Module) -> list[int]:
    """List the GPUs that hold the model's parameters."""
    return sorted({x.device.index or 0 for x in model.parameters() if x.is_cuda})


def _has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called."""
    of_bases = (nn.Module.forward, LightningModule.forward)
    return "forward" in vars(module) or type(module).forward not in of_bases


def refuse_without_forward(module: nn.Module, argument: str, *, otherwise: str = "") -> None:
    """Refuse a module that has no ``forward``, such as a LightningModule with only a training_step."""
    if _has_forward(module):
        return
    raise ValueError(
        f"{argument} is a {type(module).__name__}, which has no forward; wanted a model that makes logits. "
        f"{where_the_model_is(module, otherwise=otherwise)}"
    )


def where_the_model_is(module: nn.Module, *, otherwise: str = "") -> str:
    """Return a sentence that names the model inside a module, or says that its layers are in the module."""
    for name, part in sorted(module.named_modules(), key=lambda pair: pair[0].count(".")):
        if name and _may_be_a_model(part):
            return (
                f"Pass the model inside it, module.{name}{otherwise}. In a Trainer, that is "
                f"PackingCheck(model={name!r}, vocab_size=...)."
            )
    return (
        "No part of it can be called as a model, because its layers are in the module itself. Move them into "
        f"an nn.Module whose forward takes a batch and returns logits, and pass that{otherwise}."
    )


def _may_be_a_model(part: nn.Module) -> bool:
    """Return whether a module makes logits of a batch, by its layers and the arguments of its forward."""
    if not _has_forward(part):
        return False
    is_of_torch = type(part).__module__.startswith("torch.")
    with_parameters = [each for each in part.modules() if any(True for _ in each.parameters(recurse=False))]
    embeds = any(isinstance(each, nn.Embedding) for each in with_parameters)
    if is_of_torch or not embeds or len(with_parameters) < 2:
        return False

    call = signature(part.forward)
    if "input_ids" in call.parameters:
        return True
    try:
        call.bind(part)  # one argument, as a batch is
    except TypeError:
        return False
    return True


# Every batch norm of torch, the lazy ones included.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_HALF = (torch.bfloat16, torch.float16)
_DTYPES = (torch.float64, torch.float32, *_HALF)
_NOISE = 0.02  # standard deviation of transformers' usual initialisation
# Equal values below this size are taken as a gate that is nearly closed, such as a LayerScale of 1e-6.
_CLOSED = 1e-3


@contextmanager
def no_zero_weights(model: nn.Module) -> Generator[None]:
    """Fill unsharded parameters that are all zero, or all one value near zero, with small noise."""
    unsharded = [p for p in model.parameters() if type(p) in (nn.Parameter, Tensor) and p.dtype in _DTYPES]
    writable = [p for p in unsharded if p.numel() and not (p.is_meta or p.is_inference())]
    closed: list[tuple[nn.Parameter, float]] = []
    for parameter in writable:
        least, largest = (bound.item() for bound in parameter.detach().aminmax())
        if least == largest and abs(least) < _CLOSED:
            closed.append((parameter, least))

    with torch.no_grad():
        for seed, (parameter, value) in enumerate(closed):
            generator = torch.Generator(parameter.device).manual_seed(seed)
            parameter.normal_(0.0, _NOISE, generator=generator)
            if value:  # a root or a logarithm may be taken of it
                parameter.abs_().mul_(1.0 if value > 0 else -1.0)

    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in closed:
                parameter.fill_(value)


def working_dtype(model: nn.Module, logits: Tensor) -> torch.dtype:
    """Return the least precise dtype of a model's weight matrices, autocast and logits."""
    device = logits.device.type
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() and p.ndim > 1} | {logits.dtype}
    if device != "meta" and torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    return min(dtypes, key=lambda dtype: (dtype.itemsize, dtype == torch.float16))


def is_in_half(model: nn.Module, device: str) -> bool:
    """Return whether a model has weights in half precision, or runs under an autocast to it."""
    if device != "meta" and torch.is_autocast_enabled(device):
        return True
    return any(parameter.dtype in _HALF for parameter in model.parameters())


@contextmanager
def in_fp32(model: nn.Module, *, most: int, rounded: bool) -> Generator[bool]:
    """Compute in fp32 inside this context; yield False if this is impossible or needless.

    Weights in half precision are copied, autocast is left, and what the model itself casts to half precision,
    by an autocast of its own too, stays in fp32.
    """
    tensors = [*model.parameters(), *model.buffers()]
    halves = [tensor for tensor in tensors if tensor.dtype in _HALF]
    devices = {tensor.device.type for tensor in tensors} - {"meta"}
    plain = all(type(x) in (nn.Parameter, Tensor) and not (x.is_meta or x.is_inference()) for x in halves)
    if not (rounded or halves) or not plain or sum(tensor.numel() for tensor in halves) > most:
        yield False
        return

    held = [tensor.data for tensor in halves]
    default = torch.get_default_dtype()
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))

        sharded = any(isinstance(tensor, DTensor) for tensor in tensors)
        if not sharded:  # FSDP2 keeps the buffers into which it casts
            with suppress(PrivateNameGone):
                stack.enter_context(watch_operators(_without_halves))

        try:
            torch.set_default_dtype(torch.float32)  # Lightning's "bf16-true" sets bfloat16
            torch.clear_autocast_cache()  # weights in half precision may be in it
            for tensor in halves:
                tensor.data = tensor.data.float()
            yield True
        finally:
            torch.set_default_dtype(default)
            torch.clear_autocast_cache()  # weights in fp32 may be in it
            for tensor, data in zip(halves, held, strict=True):
                tensor.data = data


def _without_halves(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator with fp32 in place of each half precision that it is asked for."""

    def widened(value: Any) -> Any:
        return torch.float32 if isinstance(value, torch.dtype) and value in _HALF else value

    return operator(*map(widened, args), **{name: widened(value) for name, value in kwargs.items()})


def averaging_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the batch norms that average over their input in the model's present mode."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BATCH_NORMS) and (module.training or module.running_mean is None)
    }


@contextmanager
def calls_noted(modules: dict[str, nn.Module]) -> Generator[list[str]]:
    """Yield a list of names; every call of a module inside this context appends its name."""
    called: list[str] = []
    with ExitStack() as hooks:
        for name, module in modules.items():
            hook = module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
            hooks.enter_context(hook)
        yield called


# ---- Stock attention

# In slots. Longer sequences make the probe slow on a CPU, so it lowers limits of REACH or more to _LOW.
REACH = 1024
_LOW = 9
_LIMITS = frozenset(
    {"sliding_window", "attention_chunk_size", "attention_window_size", "chunk_size", "mamba_chunk_size"}
    | {"floor_scale", "log_scaling_n_floor", "local_attention", "sliding_window_size", "window_size"}
)
# Endings of the names under which dynamic rotary embeddings keep lengths; a layer type may come first.
_ROPE_LIMITS = ("original_max_seq_len", "max_seq_len_cached")


def logits_alone(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Return the logits ``[T, V]`` of one sequence ``[T]``, with transformers' eager attention."""
    no_cache = {} if getattr(model.config, "use_cache", None) is None else {"use_cache": False}
    configs = attention_configs(model)
    chosen = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            choose_attention(config, "eager")
        return logits_of(model(input_ids=input_ids[None], **no_cache))
    finally:
        for config, name in zip(configs, chosen, strict=True):
            choose_attention(config, name)


def logits_of(output: Any) -> Tensor:
    """Return a model's logits in rows, or its last hidden states if it has no head."""
    output = getattr(output, "logits", getattr(output, "last_hidden_state", output))
    logits: Tensor = output[0] if isinstance(output, tuple) else output
    if logits.ndim == 3:
        return logits[0]
    if logits.ndim == 1:
        return logits[:, None]
    return logits


def lengths_to_reach(model: nn.Module, longest: int) -> list[int]:
    """Return a length beyond all limits below ``REACH``, or no length if ``longest`` is beyond them."""
    within_reach = [size for _, _, size in _limits(model) if longest <= size < REACH]
    return [max(within_reach) + 5] if within_reach else []


@contextmanager
def lowered_limits(model: nn.Module) -> Generator[None]:
    """Lower large windows, chunks and rope limits inside this context, for packed and stock runs alike."""
    large = [(holder, name, size) for holder, name, size in _limits(model) if size >= REACH]
    notes = [
        (module, name, module.__dict__[name])
        for module in model.modules()
        for name in NOTES
        if name in module.__dict__
    ]

    try:
        for holder, name, _ in large:
            _set(holder, name, _LOW)
        if large:  # notes hold the old limits
            for module, name, _ in notes:
                del module.__dict__[name]
        yield
    finally:
        for holder, name, size in large:
            _set(holder, name, size)
        for module, name, value in notes:
            module.__dict__[name] = value


def _set(holder: Any, name: str, value: Any) -> None:
    """Set an entry of a dict, or an attribute of another object."""
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _limits(model: nn.Module) -> Iterator[tuple[Any, str, int]]:
    """Yield each length beyond which a model computes differently: its holder, name and length."""
    for config in attention_configs(model):
        rope = getattr(config, "rope_parameters", None) or {}
        entries = [entry for entry in (rope, *rope.values()) if isinstance(entry, dict)]
        if any("dynamic" in str(entry.get("rope_type")) for entry in entries):
            yield config, "max_position_embeddings", config.max_position_embeddings
        for entry in entries:
            if entry.get("rope_type") == "longrope":
                yield entry, "original_max_position_embeddings", entry["original_max_position_embeddings"]

    for holder in (*attention_configs(model), *model.modules()):
        rotary = "dynamic" in str(vars(holder).get("rope_type"))
        for name, size in list(vars(holder).items()):
            if type(size) is int and (name in _LIMITS or (rotary and name.endswith(_ROPE_LIMITS))):
                yield holder, name, size


def attention_configs(model: nn.Module) -> list[Any]:
    """Return the configs of layers that use the model's attention; a vision tower may use another."""
    configs: dict[int, Any] = {}
    root: Any = getattr(model, "config", None)
    attention_of_model = getattr(root, "_attn_implementation", None)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        attention = getattr(config, "_attn_implementation", None)
        if attention is not None and (attention == attention_of_model or config is root):
            configs[id(config)] = config
    return list(configs.values())


# Names under which configs of transformers hold how many positions a model has.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")


def positions_of(model: nn.Module) -> int | None:
    """Return how many positions a sequence may have, by the model's config; None if that is unknown."""
    config = text_config(getattr(model, "config", None))
    sizes = [getattr(config, name, None) for name in _POSITIONS]
    known = [size for size in sizes if type(size) is int and size > 0]
    return min(known) // 2 if known else None  # half, because some models count from above zero


# ---- The first module that leaks

_Key = tuple[str, int]  # the name of a module, and how often it had been called before
_Call = tuple[list[Tensor], list[Tensor]]  # rows of the inputs and outputs of one call


def first_leaking_module(
    model: nn.Module,
    first: Callable[[], Tensor],
    second: Callable[[], Tensor],
    first_rows: Tensor,
    second_rows: Tensor,
    *,
    tolerance: float = 1e-6,
) -> str | None:
    """Return the first module whose input rows agree in two runs and whose output rows differ, or None."""
    return first_differing_module((model, model), first, second, first_rows, second_rows, tolerance=tolerance)


def first_differing_module(
    models: tuple[nn.Module, nn.Module],
    first: Callable[[], Tensor],
    second: Callable[[], Tensor],
    first_rows: Tensor,
    second_rows: Tensor,
    *,
    tolerance: float,
) -> str | None:
    """Do the same for the runs of two models whose modules have the same names."""
    kinds = {name: type(module).__name__ for name, module in models[0].named_modules()}
    with _recorded(models[0], first_rows) as calls:
        first()

    with _recorded(models[1], second_rows) as others:
        second()

    for key, (inputs, outputs) in calls.items():  # in the order in which calls ended: inner modules first
        if key not in others:
            continue
        other_inputs, other_outputs = others[key]
        if _agree(inputs, other_inputs, tolerance) and not _agree(outputs, other_outputs, tolerance):
            name, _ = key
            return f"{name or 'the model itself'} ({kinds[name]})"

    return None


def _agree(first: Iterable[Tensor], second: Iterable[Tensor], tolerance: float) -> bool:
    return all(
        (a - b).abs().max().item() <= tolerance * a.abs().max().item()
        for a, b in zip(first, second, strict=False)
        if a.shape == b.shape and a.numel()
    )


@contextmanager
def _recorded(model: nn.Module, rows: Tensor) -> Generator[dict[_Key, _Call]]:
    """Record, on the CPU, rows of the per-token tensors of every call of every module; for small packs."""
    calls: dict[_Key, _Call] = {}
    counts: defaultdict[str, int] = defaultdict(int)
    slots: list[int] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs = (*args, *kwargs.values())
            if not slots:  # the embedding's call ends first, and its input is the T ids
                slots.extend([value.numel() for value in inputs if isinstance(value, Tensor)][:1])
            call = (_token_rows(inputs, slots, rows), _token_rows((output,), slots, rows))
            calls[name, counts[name]] = call
            counts[name] += 1

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(watch(name), with_kwargs=True))
        yield calls


def _token_rows(values: Iterable[Any], slots: list[int], rows: Tensor) -> list[Tensor]:
    """Return the given rows of all floating-point tensors that have a dimension of T slots."""
    rows_of_tensors: list[Tensor] = []
    for value in _tensors(values):
        dim = next((d for d, size in enumerate(value.shape) if slots and size == slots[0]), None)
        if dim is not None and value.is_floating_point():
            selected = value.detach().movedim(dim, 0)[rows.to(value.device)]
            flat = selected.reshape(len(rows), -1)  # a model may add a batch dimension
            rows_of_tensors.append(flat.float().cpu())
    return rows_of_tensors


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """Yield all tensors in values, dicts, lists and tuples of any depth."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
