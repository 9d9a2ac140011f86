"""A user's argument -> a checked number, array or word, or an error that says what to pass instead."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence, Sized
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

INT64_MAX = 2**63 - 1
Init = TypeVar("Init", bound=Callable[..., None])


def whole_number(
    value: Any, name: str, *, least: int | None = 0, most: int = INT64_MAX, advice: str = ""
) -> int:
    """Return a whole number as an int, or raise with ``advice``; ``least=None`` allows all of int64."""
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]  # a size that is being traced
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} is {described(value)}; wanted a whole number, an int. {advice}".rstrip())
    least = -INT64_MAX - 1 if least is None else least
    if value < least:
        raise ValueError(f"{name}={value}; wanted {least} or more. {advice}".rstrip())
    if value > most:
        raise ValueError(f"{name}={value}; wanted at most {most}. {advice}".rstrip())
    return value if type(value) is int else int(value)


def real_number(
    value: Any, name: str, *, above: float | None = None, least: float | None = None, advice: str = ""
) -> float:
    """Return one finite number as a float; raise if it is not ``above`` a bound, or below ``least``."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} is {described(value)}; wanted a number. {advice}".rstrip())
    # The largest ints count as infinite, because float() raises OverflowError for them.
    number = math.inf if isinstance(value, int) and abs(value) > INT64_MAX else float(value)
    is_low = (above is not None and number <= above) or (least is not None and number < least)
    if is_low or not math.isfinite(number):
        bound = ""
        if above is not None:
            bound = f" above {above}"
        elif least is not None:
            bound = f" of {least} or more"
        raise ValueError(f"{name}={value}; wanted a finite number{bound}. {advice}".rstrip())
    return number


def host_ints(
    values: Any, name: str, *, ndim: int | None = 1, least: int | None = None, advice: str = "Pass integers."
) -> npt.NDArray[np.int64]:
    """Return integers as an int64 array on the host, or raise; ``ndim=None`` allows any number of axes."""
    numbers = _as_array(values, name, advice)
    if ndim is not None and numbers.ndim != ndim:
        wanted = {0: "one number", 1: "one row of integers"}.get(ndim, f"{ndim} dimensions")
        raise ValueError(f"{name} has shape {numbers.shape}; wanted {wanted}. {advice}")
    if not numbers.size:
        return numbers.astype(np.int64)  # numpy turns an empty list into a float array
    if numbers.dtype.kind not in "iu":
        raise ValueError(f"{name} holds {numbers.dtype} values; wanted whole numbers. {advice}")
    if numbers.dtype.kind == "u" and numbers.dtype.itemsize == 8 and int(numbers.max()) > INT64_MAX:
        raise ValueError(f"{name} holds {int(numbers.max())}, past int64 ({INT64_MAX}). {advice}")
    if least is not None and numbers.min() < least:
        i = int(numbers.argmin())
        raise ValueError(f"{name}[{i}] is {numbers.flat[i]}; wanted {least} or more. {advice}")
    return numbers.astype(np.int64, copy=False)


def _as_array(values: Any, name: str, advice: str) -> npt.NDArray[Any]:
    """Return values as a numpy array on the host, of any dtype but object; a plain number is refused."""
    if isinstance(values, Tensor):
        if values.device.type == "meta":
            raise ValueError(f"{name} is on the meta device, which holds no values. {advice}")
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise ValueError(f"{name} holds {values.dtype} values; wanted whole numbers. {advice}")
        from_tensor: npt.NDArray[Any] = values.detach().cpu().numpy()
        return from_tensor

    if type(values) is list and values and type(values[0]) is int:
        try:  # three times as fast as np.asarray of a list
            return np.frombuffer(array("q", values), np.int64)
        except (TypeError, OverflowError):
            pass  # np.asarray below handles nested lists, floats and numbers past int64

    if isinstance(values, str | bytes) or not (isinstance(values, Sized) or hasattr(values, "__array__")):
        raise TypeError(f"{name} is {described(values)}; wanted a list, array or tensor of ints. {advice}")
    try:
        converted = np.asarray(values)
    except (ValueError, TypeError, RuntimeError, OverflowError) as err:  # such as rows of different lengths
        raise ValueError(f"{name} is not an array of integers ({err}). {advice}") from err
    is_plain_number = converted.ndim == 0 and not isinstance(values, np.ndarray)
    if converted.dtype.kind == "O" or is_plain_number:
        raise TypeError(f"{name} is {described(values)}; wanted a list, array or tensor of ints. {advice}")
    return converted


def int_tensor(values: Any, name: str) -> Tensor:
    """Return a tensor of integers, wide unsigned dtypes as int64; lists and arrays as int64 on the CPU."""
    if not isinstance(values, Tensor):
        if torch.compiler.is_compiling():
            return torch.as_tensor(values, dtype=torch.int64)
        return as_tensor(np.ascontiguousarray(host_ints(values, name, ndim=None)))
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(f"{name} is {values.dtype}; wanted an integer dtype. Call {name}.to(torch.int32).")
    if values.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return values.long()  # torch implements few operators for the wide unsigned dtypes
    return values


def as_tensor(values: Any) -> Tensor:
    """Return ``torch.as_tensor(values)``; copy read-only arrays first, because torch warns about them."""
    read_only = isinstance(values, np.ndarray) and not values.flags.writeable
    return torch.as_tensor(values.copy() if read_only else values)


def described(value: object) -> str:
    """Describe a value for a message: arrays by dtype and shape, others by type and 40 characters."""
    if isinstance(value, Tensor | np.ndarray):
        return f"a {type(value).__name__} of {value.dtype} {list(value.shape)}"
    if value is None:
        return "None"
    return f"a {type(value).__name__}, {value!r:.40}"


def instance(value: Any, name: str, *wanted: type, advice: str = "") -> None:
    """Raise TypeError unless a value is an instance of one of the given classes."""
    if not isinstance(value, wanted):
        names = " or ".join(kind.__name__ for kind in wanted)
        raise TypeError(f"{name} is {described(value)}; wanted {names}. {advice}".rstrip())


def flags(**values: Any) -> None:
    """Raise TypeError unless every keyword's value is True or False."""
    for name, value in values.items():
        instance(value, name, bool, advice="Pass True or False.")


def choice(value: Any, name: str, *wanted: str, advice: str = "") -> None:
    """Raise ValueError unless a value is one of the given words."""
    if not isinstance(value, str) or value not in wanted:
        got = f"{name}={value!r:.40}" if isinstance(value, str) else f"{name} is {described(value)}"
        raise ValueError(f"{got}; wanted one of {', '.join(wanted)}. {advice}".rstrip())


def shaped(value: Tensor, name: str, wanted: Sequence[int], what: str) -> None:
    """Raise ValueError unless a tensor has the wanted shape; ``what`` ends the message."""
    if tuple(value.shape) != tuple(wanted):
        raise ValueError(f"{name} is {list(value.shape)}, wanted {list(wanted)}, {what}")


def refuse_missing(name: str, advice: str) -> None:
    """Raise ValueError if a name looks like a path, not like a model on a hub, but does not exist."""
    path = Path(name)
    # A model on a hub is "name" or "owner/name".
    is_path = path.is_absolute() or name.startswith(".") or name.count("/") > 1 or path.suffix == ".json"
    if is_path and not path.exists():
        raise ValueError(f"{name} does not exist. {advice}")


def answers(required: str = "", **advice: str) -> Callable[[Init], Init]:
    """Let an ``__init__`` answer arguments of other libraries, and a missing one, with what to pass.

    Args:
        required: the message for each required keyword that is missing is ``advice`` of this name.
        advice: name of an argument that ``__init__`` does not have, or of ``required`` -> what to do.
    """

    def decorate(init: Init) -> Init:
        @wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            owner = type(self).__name__
            for name in kwargs.keys() & advice.keys() - {required}:
                raise TypeError(f"{owner} has no {name}=. {advice[name]}")
            if required and required not in kwargs:
                raise TypeError(f"{owner} needs {required}=. {advice[required]}")
            init(self, *args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate
