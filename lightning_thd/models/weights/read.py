"""``from_pretrained`` -> a model without memory, and later the tensors of its folder that a rank has kept.

transformers reads and converts the tensors (a mixture's experts lie in the folder one by one), as it does in
``from_pretrained`` itself; it is given a copy of the model's skeleton that holds what the rank keeps.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_ATTRIBUTE = "_thd_unread"


@dataclass(frozen=True, slots=True)
class _Unread:
    """A model built by ``from_pretrained`` on the meta device whose tensors are still to be read.

    Attributes:
        skeleton: a copy of it on the meta device.
        tensors: names to its parameters and buffers, which wrappers and cuts keep.
        versions: of the tensors, which count what was written into them.
        files: of safetensors.
        options: how to read them.
    """

    skeleton: nn.Module
    tensors: dict[str, Tensor]
    versions: dict[str, int]
    files: list[str]
    options: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the model has nothing of its own to read


@contextlib.contextmanager
def postponed_reading() -> Generator[None]:
    """Make ``from_pretrained`` build models on the meta device, without reading weights.

    Folders of safetensors alone are postponed. Others, quantised models and those with a ``device_map`` are
    read at once, as always.
    """
    from transformers import PreTrainedModel

    kind: Any = PreTrainedModel
    read, finish = kind._load_pretrained_model, kind._finalize_model_loading

    def postpone(model: Any, state: Any, files: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        plain = state is None and options.hf_quantizer is None and options.device_map is None
        names = [str(file) for file in files or ()]
        if not plain or not names or not all(name.endswith(".safetensors") for name in names):
            return read(model, state, files, options, *args, **kwargs)
        tensors = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        skeleton = copy.deepcopy(model)
        versions = {name: tensor._version for name, tensor in tensors.items()}
        model.__dict__[_ATTRIBUTE] = _Unread(skeleton, tensors, versions, names, options)
        return _nothing_found(), None

    def finish_later(model: Any, options: Any, found: Any) -> Any:
        if model.__dict__.get(_ATTRIBUTE) is None:
            return finish(model, options, found)
        model.tie_weights(recompute_mapping=False)
        return found

    kind._load_pretrained_model = staticmethod(postpone)
    kind._finalize_model_loading = staticmethod(finish_later)
    try:
        yield
    finally:
        kind._load_pretrained_model, kind._finalize_model_loading = staticmethod(read), staticmethod(finish)


def read_weights(module: nn.Module) -> None:
    """Read the tensors that a module still holds of models built under ``postponed_reading``, in place.

    What their folders lack, and what is in no folder, such as the frequencies of a rope, stays on the meta
    device for ``draw_weights``.

    Args:
        module: holds the models, perhaps wrapped, cut or frozen since.

    Raises:
        ValueError: when a tensor has another shape, or cannot be converted.
    """
    for child in list(module.modules()):
        unread = child.__dict__.pop(_ATTRIBUTE, None)
        if unread is not None:
            _read(module, unread)


def require_unchanged(module: nn.Module) -> None:
    """Refuse models that were changed between ``from_pretrained`` and now, before they are cut.

    Raises:
        ValueError: naming what was replaced, as by ``resize_token_embeddings``, or written into.
    """
    held = {id(tensor) for tensor in module.parameters()}
    for child in module.modules():
        unread = child.__dict__.get(_ATTRIBUTE)
        if unread is None:
            continue
        lost = [n for n, t in unread.tensors.items() if id(t) not in held and isinstance(t, nn.Parameter)]
        known = {id(tensor) for tensor in unread.tensors.values()}
        added = [n for n, p in child.named_parameters() if id(p) not in known and n in unread.tensors]
        shapes = {n: _tensor(unread.skeleton, n).shape for n in unread.tensors}
        written = [
            n for n, t in unread.tensors.items() if t._version != unread.versions[n] or t.shape != shapes[n]
        ]
        if written or (lost and added):
            raise ValueError(
                f"{(written or added)[:4]} of {type(child).__name__} changed after from_pretrained, which "
                "reads nothing under a pipeline until the model is cut: the change or what is read would "
                "be lost. Build the model in __init__, where it is read whole."
            )


def _read(module: nn.Module, unread: _Unread) -> None:
    held = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    kept = {name: tensor for name, tensor in unread.tensors.items() if id(tensor) in held and tensor.is_meta}
    skeleton: Any = unread.skeleton
    expected = list(skeleton.state_dict())
    for path, child in skeleton.named_modules():
        for tensors in (child._parameters, child._buffers):
            for name in [name for name in tensors if f"{path}.{name}".lstrip(".") not in kept]:
                del tensors[name]
    found, _ = type(skeleton)._load_pretrained_model(
        skeleton, None, unread.files, unread.options, expected_keys=expected
    )
    _check(skeleton, found, kept)
    read: dict[int, Tensor] = {}
    for name, tensor in kept.items():
        new = _tensor(skeleton, name)
        if not new.is_meta:
            read[id(tensor)] = _as(tensor, new)
    for child in module.modules():
        for held_here in (child._parameters, child._buffers):
            for name, stands in held_here.items():
                if id(stands) in read:
                    held_here[name] = read[id(stands)]  # type: ignore[assignment]


def _check(skeleton: nn.Module, found: Any, kept: dict[str, Tensor]) -> None:
    """Raise for tensors that do not fit the model, and warn of those the folder lacks."""
    wrong = [*map(str, found.mismatched_keys), *map(str, found.conversion_errors), *found.error_msgs]
    if wrong:
        raise ValueError(
            f"The folder of {type(skeleton).__name__} holds tensors that do not fit the model: {wrong[:4]}. "
            "Give from_pretrained the config they were saved with."
        )
    alone = {id(tensor): True for tensor in kept.values()}
    for name, tensor in kept.items():  # a tied weight is read under one of its names
        if not _tensor(skeleton, name).is_meta:
            alone[id(tensor)] = False
    persistent = set(skeleton.state_dict())
    missing = [name for name, tensor in kept.items() if alone[id(tensor)] and name in persistent]
    if missing:
        warnings.warn(
            f"The folder of {type(skeleton).__name__} lacks {missing[:4]}, which get random values.",
            stacklevel=2,
        )


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    owner = module.get_submodule(path)
    found = owner._parameters.get(own, owner._buffers.get(own))
    assert found is not None
    return found


def _as(wanted: Tensor, new: Tensor) -> Tensor:
    """Return a tensor with the dtype and ``requires_grad`` of the one it replaces."""
    data = new.detach().to(wanted.dtype)
    return nn.Parameter(data, wanted.requires_grad) if isinstance(wanted, nn.Parameter) else data


def _nothing_found() -> Any:
    from transformers.core_model_loading import LoadStateDictInfo

    fields = LoadStateDictInfo.__dataclass_fields__
    return LoadStateDictInfo(**{name: {} if "errors" in name else set() for name in fields})
