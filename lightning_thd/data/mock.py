"""A table or a distribution of lengths -> a map-style data set of random tokens with exactly those lengths.

For measuring and testing without data. The settings are those of the Megatron-LM mock fine-tuning data set,
as a mapping, as JSON text or as a JSON file::

    {"mode": "file", "path": "lengths.csv"}
    {"mode": "distribution", "type": "lognormal", "min_seq_len": 1024, "max_seq_len": 8192,
     "mean_seq_len": 4096, "lognormal_sigma": 1.1}

Length and tokens of sequence i depend only on (seed, i), so that every rank and worker sees the same.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from lightning_thd._checks import host_ints
from lightning_thd.packing.permutation import derive_key, keyed_hashes

IntArray = npt.NDArray[np.int64]
Bounds = Literal["resample", "clip"]

_HALVINGS = 200  # halving an interval of log means so often reaches the last bit of a float64
_LENGTHS, _TOKENS, _ROUNDING = 20, 21, 22  # purposes of keys


@dataclass(frozen=True, kw_only=True, slots=True)
class LognormalLengths:
    """Sequence lengths whose logarithm is normally distributed, cut at two bounds."""

    min_seq_len: int  # tokens of the shortest sequence possible
    max_seq_len: int  # tokens of the longest
    mean_seq_len: float  # tokens of a sequence on average
    lognormal_sigma: float  # standard deviation of the logarithm
    # ``"resample"`` draws again what falls outside and shifts the distribution so that the mean is the one
    # asked for; ``"clip"`` moves what falls outside onto the bounds, as is usual, and misses the mean: 4096
    # between 1024 and 8192 at sigma 1.1 becomes 3257
    bounds: Bounds = "resample"

    def __post_init__(self) -> None:
        if self.bounds not in ("resample", "clip"):
            raise ValueError(f"bounds={self.bounds!r} is unknown. Choose 'resample' or 'clip'.")
        if not 1 <= self.min_seq_len < self.max_seq_len:
            raise ValueError(
                f"min_seq_len={self.min_seq_len} and max_seq_len={self.max_seq_len}: "
                "the first must be at least 1 and below the second."
            )
        if not self.lognormal_sigma > 0:
            raise ValueError(f"lognormal_sigma={self.lognormal_sigma} must be above 0, for example 1.1.")
        if not self.min_seq_len < self.mean_seq_len < self.max_seq_len:
            raise ValueError(
                f"mean_seq_len={self.mean_seq_len} lies outside ({self.min_seq_len}, {self.max_seq_len}), "
                "which no distribution between these bounds can have. Change the mean or a bound."
            )

    def draw(self, positions: npt.ArrayLike, *, seed: int = 0) -> IntArray:
        """Draw the lengths of the sequences of given numbers, int64 ``[K]``, without drawing the others."""
        places = np.asarray(positions, dtype=np.uint64)
        uniform = torch.from_numpy(_uniform(places, derive_key(seed, _LENGTHS)))
        sigma = float(self.lognormal_sigma)
        if self.bounds == "clip":
            mu = math.log(self.mean_seq_len) - sigma**2 / 2
            drawn = torch.exp(mu + sigma * torch.special.ndtri(uniform))
            return drawn.clamp(self.min_seq_len, self.max_seq_len).long().numpy()
        low, high = math.log(self.min_seq_len), math.log(self.max_seq_len)
        mu = _log_mean(self.mean_seq_len, sigma, low, high)
        first, last = _normal((low - mu) / sigma), _normal((high - mu) / sigma)
        drawn = torch.exp(mu + sigma * torch.special.ndtri(first + uniform * (last - first)))
        # Rounded up or down by chance, 2.3 up in three of ten cases: any other rounding would move the mean.
        drawn = drawn + torch.from_numpy(_uniform(places, derive_key(seed, _ROUNDING)))
        return drawn.floor().long().clamp(self.min_seq_len, self.max_seq_len).numpy()


class MockDataset:
    """Random tokens in sequences of given lengths: ``[i]`` gives ``{"input_ids": int64 [length]}``.

    Args:
        config: the settings above as a mapping, JSON text, or the path of a ``.json`` file. ``"bounds"`` may
            be added to a distribution, ``"column"`` (a name or a number) to a file.
        num_sequences: sequences; by default 10,000 of a distribution and as many as a file has rows. More
            than that start again at the first row.
        vocab_size: token ids are drawn from ``[0, vocab_size)``.
        seed: of the lengths and the tokens.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | Path,
        *,
        num_sequences: int | None = None,
        vocab_size: int = 32_000,
        seed: int = 0,
    ) -> None:
        if num_sequences is not None and num_sequences < 1:
            raise ValueError(f"num_sequences={num_sequences}: a data set has at least one sequence.")
        if vocab_size < 1:
            raise ValueError(f"vocab_size={vocab_size}: there must be at least one token id.")
        self.vocab_size = vocab_size
        self.seed = seed
        self._lengths = _make_lengths(_read_config(config), num_sequences, seed)

    @property
    def lengths(self) -> IntArray:
        """Return the tokens of every sequence, int64 ``[N]``, without making the tokens."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int64]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Sequence {index} was asked of {len(self)}. Ask for one below that.")
        index %= len(self)
        positions = np.arange(self._lengths[index], dtype=np.uint64)
        hashes = keyed_hashes(positions, derive_key(self.seed, _TOKENS, index))
        return {"input_ids": (hashes % np.uint64(self.vocab_size)).astype(np.int64)}


def _read_config(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    text = str(config)
    if not text.lstrip().startswith("{"):
        path = Path(text)
        if not path.is_file():
            raise ValueError(
                f"config={text!r} is neither JSON text nor a file. Pass a mapping, JSON, or a JSON file."
            )
        text = path.read_text()
    try:
        found = json.loads(text)
    except json.JSONDecodeError as err:
        raise ValueError(
            f"config is no valid JSON ({err}): {text[:80]!r}. Pass the settings as JSON."
        ) from err
    if not isinstance(found, dict):
        raise ValueError(f'config holds a JSON {type(found).__name__}. Pass an object with a "mode".')
    return found


def _make_lengths(config: dict[str, Any], num_sequences: int | None, seed: int) -> IntArray:
    mode = config.pop("mode", None)
    if mode == "file":
        rows = read_lengths_csv(*_take(config, "path", column=None))
        return rows if num_sequences is None else np.resize(rows, num_sequences)
    if mode != "distribution":
        raise ValueError(f'"mode" is {mode!r}. Set it to "file" or "distribution".')
    kind = config.pop("type", None)
    if kind != "lognormal":
        raise ValueError(
            f'"type" is {kind!r}. Only "lognormal" is known; other lengths can be read from a file.'
        )
    names = ("min_seq_len", "max_seq_len", "mean_seq_len", "lognormal_sigma")
    *values, bounds = _take(config, *names, bounds="resample")
    shape = LognormalLengths(**dict(zip(names, values, strict=True)), bounds=bounds)
    return shape.draw(np.arange(10_000 if num_sequences is None else num_sequences), seed=seed)


def _take(config: dict[str, Any], *required: str, **optional: Any) -> list[Any]:
    missing = [name for name in required if name not in config]
    unknown = sorted(set(config) - set(required) - set(optional))
    if missing or unknown:
        raise ValueError(
            f"The mock settings miss {missing} and have {unknown} that mean nothing here. "
            f"Wanted {list(required)}, and perhaps {list(optional)}."
        )
    return [config[name] for name in required] + [config.get(name, value) for name, value in optional.items()]


def read_lengths_csv(path: str | Path, column: str | int | None = None) -> IntArray:
    """Read lengths, int64 ``[N]``, from a column (name, number, or None: the only one) of a CSV."""
    if not Path(path).is_file():
        raise ValueError(f"There is no file {str(path)!r} with lengths. Correct the path.")
    with Path(path).open(newline="") as file:
        rows = [
            (number, row)
            for number, row in enumerate(csv.reader(file), 1)
            if any(cell.strip() for cell in row)
        ]
    names = [cell.strip() for cell in rows[0][1]] if rows and not any(map(_is_int, rows[0][1])) else []
    at = _column(path, names, rows, column)
    lengths = []
    for number, row in rows[1 if names else 0 :]:
        if at >= len(row) or not _is_int(row[at]) or int(row[at]) < 1:
            raise ValueError(
                f"Line {number} of {path} has {row}, with no positive integer in column {at}. Correct it."
            )
        lengths.append(int(row[at]))
    if not lengths:
        raise ValueError(f"{path} has no lengths. Write one positive integer on each line.")
    return host_ints(lengths, "lengths", least=1, advice="Draw positive lengths.")


def _column(
    path: str | Path, names: list[str], rows: list[tuple[int, list[str]]], column: str | int | None
) -> int:
    width = len(rows[0][1]) if rows else 1
    if isinstance(column, str) and column in names:
        return names.index(column)
    if isinstance(column, int) and 0 <= column < width:
        return column
    if column is None and width == 1:
        return 0
    raise ValueError(
        f"{path} has {width} columns named {names or 'nothing'}, and column={column!r} chooses none of them. "
        'Set "column" to a name or a number.'
    )


def _is_int(cell: str) -> bool:
    return cell.strip().lstrip("+-").isdigit()


def _uniform(positions: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.float64]:
    """Return numbers in (0, 1), one a position: the middles of 2**53 equal steps, so never 0 or 1."""
    return ((keyed_hashes(positions, key) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _log_mean(mean: float, sigma: float, low: float, high: float) -> float:
    """Find the mean of the logarithm for which the bounded distribution has the wanted mean."""
    below, above = low - 40 * sigma, high + 40 * sigma
    for _ in range(_HALVINGS):
        mu = (below + above) / 2
        if _bounded_mean(mu, sigma, low, high) < mean:
            below = mu
        else:
            above = mu
    return (below + above) / 2


def _bounded_mean(mu: float, sigma: float, low: float, high: float) -> float:
    """Return the mean of exp(N(mu, sigma)) within [exp(low), exp(high)], a ratio of integrals."""
    inside = _between((low - mu) / sigma, (high - mu) / sigma)
    if inside == 0.0:  # all of it so far out that a float64 cannot tell it from the nearer bound
        return math.exp(low if mu < low else high)
    weighted = _between((low - mu) / sigma - sigma, (high - mu) / sigma - sigma)
    return math.exp(mu + sigma**2 / 2) * weighted / inside


def _between(first: float, last: float) -> float:
    """Return the normal probability of [first, last], from the nearer tail to keep its digits."""
    if first > 0:
        return _normal(-first) - _normal(-last)
    return _normal(last) - _normal(first)
