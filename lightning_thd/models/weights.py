"""Models built on the meta device -> the weights that a rank keeps, drawn at random or read from a folder.

A drawn weight has the same values however the model is split, because its generator is seeded with ``seed``
and the name of the weight or module. In ``postponed_reading``, ``from_pretrained`` returns a model on the
meta device. ``read_weights`` lets transformers read a rank's tensors into a copy, then puts them in place.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd._imports import available
from lightning_thd._private import private_of, set_private
from lightning_thd.batch.upload import version
from lightning_thd.warnings import THDWarning

# In the table of private names.
_INITIALISE = "transformers.PreTrainedModel._init_weights"
_READ = "transformers.PreTrainedModel._load_pretrained_model"
_FINISH = "transformers.PreTrainedModel._finalize_model_loading"
_MARKED = "transformers.initialization.tensor._is_hf_initialized"
_MARK = _MARKED.rpartition(".")[2]  # on a tensor that transformers' initialisers must not touch

# ---- Drawn


def draw_weights(module: nn.Module, device: torch.device, *, seed: int) -> None:
    """Allocate all tensors that are on the meta device and set their initial values, in place."""
    filled = _with_memory(module, device)
    if not filled:
        return

    names = {id(tensor): name for name, tensor in filled.items()}
    tensors = [*module.parameters(), *module.buffers()]
    has_values = [tensor for tensor in tensors if id(tensor) not in names]
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad(), _untouched(has_values), _seeded(names, seed):
        _initialise(module, names, seed)

    present = {id(tensor) for *_, tensor in _entries(module)}  # an initialiser may replace a buffer
    unset = [name for name, tensor in filled.items() if id(tensor) in present and _is_unset(tensor)]
    if unset:
        raise ValueError(
            f"{type(module).__name__} holds {unset[:4]} on the meta device, and the modules that own them "
            "have no _init_weights() or reset_parameters() that sets them. Write one."
        )


def _with_memory(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Replace tensors on the meta device by memory that is marked as unset; shared tensors stay shared."""
    replacements: dict[int, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for path, table, name, tensor in _entries(module):
        if tensor is None or not tensor.is_meta:
            continue
        if id(tensor) not in replacements:
            replacements[id(tensor)] = _like(tensor, device)
            filled[path] = replacements[id(tensor)]
        table[name] = replacements[id(tensor)]
    return filled


def _entries(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor | None]]:
    """Yield, for every parameter and buffer, its path, the dict that holds it, its key there, and itself."""
    for path, child in module.named_modules():
        for table in (child._parameters, child._buffers):
            for name, tensor in list(table.items()):
                yield f"{path}.{name}".lstrip("."), table, name, tensor


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor or parameter like a meta one, on a device, with all entries but bools marked unset."""
    data = torch.empty_like(tensor.detach(), device=device)
    if data.dtype != torch.bool:
        data.fill_(_unset(data.dtype))
    if not isinstance(tensor, nn.Parameter):
        return data

    parameter = nn.Parameter(data, tensor.requires_grad)
    attributes = {name: value for name, value in vars(tensor).items() if name != _MARK}
    parameter.__dict__.update(attributes)
    return parameter


def _unset(dtype: torch.dtype) -> float | int:
    """Return the value that marks an entry as not set yet: NaN, or the largest integer."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _is_unset(tensor: Tensor) -> bool:
    """Return whether an entry of a tensor was never written."""
    if not tensor.numel():
        return False
    if tensor.dtype == torch.bool:  # no value can mark it, but every write in place raises its version
        return version(tensor) == 0
    mark = _unset(tensor.dtype)
    is_marked = tensor.isnan() if math.isnan(mark) else tensor == mark
    return bool(is_marked.any())


def _initialise(module: nn.Module, names: Mapping[int, str], seed: int) -> None:
    """Call the initialiser of every module that holds unset tensors, children before parents."""
    adapters: dict[str, Any] = {}
    owners: Counter[int] = Counter()
    for child in module.modules():
        adapters |= vars(child).get("peft_config") or {}
        owners.update(map(id, child.parameters(recurse=False)))

    def walk(child: nn.Module, path: str, model: Any) -> None:
        unset = [t for t in [*child.parameters(), *child.buffers()] if id(t) in names]
        if not unset:
            return

        initialise = getattr(type(child), _INITIALISE.rpartition(".")[2], None)
        if hasattr(child, "config") and callable(initialise):
            model = child
        added = getattr(child, "adapter_layer_names", ())  # children that PEFT has added
        for name, below in child.named_children():
            walk(below, f"{path}.{name}" if path else name, None if name in added else model)

        torch.manual_seed(_seed_of(f"{path}()", seed))
        if added:
            _initialise_adapters(child, path, adapters)
            return
        if model is not None:  # a block may set the weights of its children
            private_of(model, _INITIALISE)(child)

        tensors = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        drawn = [tensor for tensor in tensors if id(tensor) in names]
        reset: Any = getattr(child, "reset_parameters", None)
        if reset is not None and any(map(_is_unset, drawn)):
            reset()

        for tensor in drawn:
            if owners[id(tensor)] > 1:  # a tied weight is set only once, by its first owner
                setattr(tensor, _MARK, True)

    walk(module, "", None)


def _initialise_adapters(layer: Any, path: str, configs: Mapping[str, Any]) -> None:
    """Initialise LoRA adapters by ``init_lora_weights``; False keeps the values that nn.Linear draws."""
    kinds = {name: getattr(configs.get(name), "init_lora_weights", None) for name in getattr(layer, "r", ())}
    if not hasattr(layer, "reset_lora_parameters") or not {*kinds.values()} <= {True, False, "gaussian"}:
        raise ValueError(
            f"The adapters of {path} ({type(layer).__name__}) on the meta device have init_lora_weights="
            f"{[*kinds.values()]}. Only LoRA's True, False and 'gaussian' work there, no modules_to_save."
        )
    for name, kind in kinds.items():
        if kind is not False:
            layer.reset_lora_parameters(name, kind)


def _seed_of(name: str, seed: int) -> int:
    """Return the seed of a weight or module: 63 bits, as generators take them."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def _untouched(tensors: list[Tensor]) -> Generator[None]:
    """Mark tensors in this context so that transformers' initialisers do not touch them."""
    _require_mark()
    marked = [tensor for tensor in tensors if not hasattr(tensor, _MARK)]
    for tensor in marked:
        setattr(tensor, _MARK, True)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, _MARK)


@functools.cache
def _require_mark() -> None:
    """Refuse a transformers whose initialisers ignore the mark, and would draw kept weights again."""
    if not available("transformers"):
        return
    from transformers import initialization

    tensor = nn.Parameter(torch.zeros(1))
    setattr(tensor, _MARK, True)
    initialization.ones_(tensor)
    if tensor.item() != 0:
        private_of(object(), _MARKED)  # raises


@contextlib.contextmanager
def _seeded(names: Mapping[int, str], seed: int) -> Generator[None]:
    """Inside this context, seed the generator by a tensor's name before each call that fills the tensor."""
    if not available("transformers"):
        yield
        return

    from transformers import initialization

    originals = {
        name: value
        for name, value in vars(initialization).items()
        if name.endswith("_") and not name.startswith("_") and callable(value)
    }

    def seeded(call: Callable[..., Any]) -> Callable[..., Any]:
        def filling(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if id(tensor) in names:
                torch.manual_seed(_seed_of(names[id(tensor)], seed))
            return call(tensor, *args, **kwargs)

        return filling

    try:
        for name, call in originals.items():
            setattr(initialization, name, seeded(call))
        with initialization.guard_torch_init_functions():
            yield
    finally:
        for name, call in originals.items():
            setattr(initialization, name, call)


# ---- Read

_ATTRIBUTE = "_thd_unread"


@dataclass(frozen=True, slots=True)
class _Unread:
    """A model that ``from_pretrained`` built on the meta device and whose tensors are not read yet."""

    skeleton: nn.Module  # a copy of the model on the meta device
    tensors: dict[str, Tensor]  # parameters and buffers by name; wrapping and cutting keep these objects
    versions: dict[str, int]  # the tensors' versions, which rise with every write
    files: list[str]  # paths of safetensors files
    options: Any  # transformers' options for reading the files

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the model has no tensors to read


@contextlib.contextmanager
def postponed_reading() -> Generator[None]:
    """Make ``from_pretrained`` build safetensors models on the meta device, without reading weights yet."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import LoadStateDictInfo

    kind: Any = PreTrainedModel
    read = private_of(kind, _READ)
    finish = private_of(kind, _FINISH)

    def postpone(model: Any, state: Any, files: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        plain = state is None and options.hf_quantizer is None and options.device_map is None
        names = [str(file) for file in files or ()]
        if not plain or not names or not all(name.endswith(".safetensors") for name in names):
            return read(model, state, files, options, *args, **kwargs)

        tensors = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        skeleton = copy.deepcopy(model)
        versions = {name: version(tensor) for name, tensor in tensors.items()}
        model.__dict__[_ATTRIBUTE] = _Unread(skeleton, tensors, versions, names, options)
        fields = LoadStateDictInfo.__dataclass_fields__
        nothing_read: dict[str, Any] = {name: {} if "errors" in name else set() for name in fields}
        return LoadStateDictInfo(**nothing_read), None

    def finish_later(model: Any, options: Any, info: Any) -> Any:
        if model.__dict__.get(_ATTRIBUTE) is None:
            return finish(model, options, info)
        model.tie_weights(recompute_mapping=False)
        return info

    set_private(kind, _READ, staticmethod(postpone))
    set_private(kind, _FINISH, staticmethod(finish_later))
    try:
        yield
    finally:
        set_private(kind, _READ, staticmethod(read))
        set_private(kind, _FINISH, staticmethod(finish))


def read_weights(module: nn.Module) -> None:
    """Read in place the tensors that a module keeps of models built under ``postponed_reading``."""
    for child in list(module.modules()):
        unread = child.__dict__.pop(_ATTRIBUTE, None)
        if unread is not None:
            _read(module, unread)


def require_unchanged(module: nn.Module) -> None:
    """Refuse, before a pipeline cuts them, models whose tensors changed since ``from_pretrained``."""
    held = {id(tensor) for tensor in module.parameters()}
    for child in module.modules():
        unread = child.__dict__.get(_ATTRIBUTE)
        if unread is None:
            continue

        built = {id(tensor) for tensor in unread.tensors.values()}
        added = [
            name
            for name, parameter in child.named_parameters()
            if id(parameter) not in built and name in unread.tensors
        ]
        written: list[str] = []
        lost: list[str] = []
        for name, tensor in unread.tensors.items():
            built_shape = _tensor(unread.skeleton, name).shape
            if version(tensor) != unread.versions[name] or tensor.shape != built_shape:
                written.append(name)
            if id(tensor) not in held and isinstance(tensor, nn.Parameter):
                lost.append(name)

        if written or (lost and added):
            raise ValueError(
                f"{(written or added)[:4]} of {type(child).__name__} changed after from_pretrained, which "
                "reads weights under a pipeline only when the model is cut. Build the model in __init__."
            )


def _read(module: nn.Module, unread: _Unread) -> None:
    """Read the tensors that ``module`` still holds of one model, and put them in place."""
    held = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    kept = {name: tensor for name, tensor in unread.tensors.items() if id(tensor) in held and tensor.is_meta}
    skeleton: Any = unread.skeleton
    expected = list(skeleton.state_dict())

    for path, table, name, _ in _entries(skeleton):
        if path not in kept:
            del table[name]

    info, _ = private_of(type(skeleton), _READ)(
        skeleton, None, unread.files, unread.options, expected_keys=expected
    )
    _check_read(skeleton, info, kept)

    replacements: dict[int, Tensor] = {}
    for name, tensor in kept.items():
        read = _tensor(skeleton, name)
        if read.is_meta:
            continue
        data = read.detach().to(tensor.dtype)  # the model's own dtype and requires_grad stay
        if isinstance(tensor, nn.Parameter):
            data = nn.Parameter(data, tensor.requires_grad)
        replacements[id(tensor)] = data

    for _, table, name, present in _entries(module):
        if id(present) in replacements:
            table[name] = replacements[id(present)]


def _check_read(skeleton: nn.Module, info: Any, kept: dict[str, Tensor]) -> None:
    """Raise for tensors that do not fit the model, and warn of those that the files do not hold."""
    wrong = [*map(str, info.mismatched_keys), *map(str, info.conversion_errors), *info.error_msgs]
    if wrong:
        raise ValueError(
            f"The folder of {type(skeleton).__name__} holds tensors that do not fit the model: {wrong[:4]}. "
            "Load it with the config that it was saved with."
        )

    # A tied weight is read under only one of its names.
    read = {id(tensor) for name, tensor in kept.items() if not _tensor(skeleton, name).is_meta}
    persistent = set(skeleton.state_dict())
    missing = [name for name, tensor in kept.items() if id(tensor) not in read and name in persistent]
    if missing:
        message = f"The folder of {type(skeleton).__name__} lacks {missing[:4]}, which get random values."
        warnings.warn(message, THDWarning, stacklevel=2)


def _tensor(module: nn.Module, path: str) -> Tensor:
    """Return the parameter or buffer of a module at a path such as "layers.0.weight"."""
    owner_path, _, name = path.rpartition(".")
    owner = module.get_submodule(owner_path)
    tensor = owner._parameters.get(name, owner._buffers.get(name))
    assert tensor is not None
    return tensor
