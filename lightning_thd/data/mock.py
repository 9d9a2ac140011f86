"""A file or a distribution of lengths -> a map-style data set of random tokens with these lengths.

The settings are those of the Megatron-LM mock fine-tuning data set::

    {"mode": "file", "path": "lengths.csv"}
    {"mode": "distribution", "type": "lognormal", "min_seq_len": 1024, "max_seq_len": 8192,
     "mean_seq_len": 4096, "lognormal_sigma": 1.1}

Drawn lengths are clipped to their bounds, so the second example has a mean of about 3,250. Sequence i depends
only on the arguments and i, so that every rank and worker makes the same sequence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_thd.packing.permutation import derive_key, keyed_hashes

IntArray = npt.NDArray[np.int64]

# Mixed into the keys that draw lengths and tokens, so that the two do not depend on each other.
_LENGTHS = 20
_TOKENS = 21
_LOGNORMAL = ("min_seq_len", "max_seq_len", "mean_seq_len", "lognormal_sigma")


class MockDataset:
    """Random tokens in sequences of given lengths: ``[i]`` gives ``{"input_ids": int64 [length]}``.

    Args:
        config: the settings above as a mapping, JSON text, or the path of a ``.json`` file. A file of lengths
            has one length per line, with or without a heading.
        num_sequences: by default 10,000, or the rows of a file; a larger number repeats the rows.
        vocab_size: token ids are drawn from ``[0, vocab_size)``.
        seed: the seed of the lengths and the tokens.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | Path,
        *,
        num_sequences: int | None = None,
        vocab_size: int = 32_000,
        seed: int = 0,
    ) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size={vocab_size}: there must be at least one token id.")
        self.vocab_size = vocab_size
        self.seed = seed
        self._lengths = _make_lengths(_read_config(config), num_sequences, seed)

    @property
    def lengths(self) -> IntArray:
        """Return the length of every sequence, int64 ``[N]``, without making the tokens."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int64]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no sequence {index} in a set of {len(self)}. Ask for one of the set.")
        index %= len(self)
        positions = np.arange(self._lengths[index], dtype=np.uint64)
        hashes = keyed_hashes(positions, derive_key(self.seed, _TOKENS, index))
        return {"input_ids": (hashes % np.uint64(self.vocab_size)).astype(np.int64)}


def _read_config(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    text = str(config)
    is_json = text.lstrip().startswith("{")
    if not is_json:
        text = Path(text).read_text()
    return dict(json.loads(text))


def _make_lengths(config: dict[str, Any], num_sequences: int | None, seed: int) -> IntArray:
    """Read or draw the lengths that the settings ask for, int64 ``[N]``."""
    mode = config.pop("mode", None)
    kind = config.pop("type", "lognormal")
    if mode not in ("file", "distribution"):
        raise ValueError(f'"mode" is {mode!r}. Set it to "file" or "distribution".')
    if kind != "lognormal":
        raise ValueError(f'"type" is {kind!r}. Set it to "lognormal", or leave it out.')
    wanted = ("path",) if mode == "file" else _LOGNORMAL
    if set(config) != set(wanted):
        raise ValueError(f"The mock settings are {sorted(config)}, wanted {sorted(wanted)}.")

    if mode == "file":
        rows = read_lengths(config["path"])
        return rows if num_sequences is None else np.resize(rows, num_sequences)
    count = 10_000 if num_sequences is None else num_sequences
    return _draw(*(config[name] for name in _LOGNORMAL), count=count, seed=seed)


def _draw(low: int, high: int, mean: float, sigma: float, *, count: int, seed: int) -> IntArray:
    """Draw lengths whose logarithm is normally distributed, clipped to two bounds, int64 ``[N]``."""
    if not (1 <= low < mean < high and sigma > 0):
        raise ValueError(
            f"min_seq_len={low}, mean_seq_len={mean}, max_seq_len={high}, lognormal_sigma={sigma}: "
            "lengths must be at least 1 and ascend, and sigma must be above 0."
        )
    hashes = keyed_hashes(np.arange(count, dtype=np.uint64), derive_key(seed, _LENGTHS))
    # Divide (0, 1) into 2**52 equal steps and take their middles, which are never 0 or 1.
    steps = (hashes >> np.uint64(12)).astype(np.float64)
    uniform = torch.from_numpy((steps + 0.5) * 2.0**-52)
    normal = torch.special.ndtri(uniform)  # the inverse of the cumulative distribution
    # exp(mu + sigma * normal) has the mean exp(mu + sigma**2 / 2), before it is clipped.
    drawn = torch.exp(math.log(mean) - sigma**2 / 2 + sigma * normal)
    return drawn.clamp(low, high).long().numpy()


def read_lengths(path: str | Path) -> IntArray:
    """Read lengths, int64 ``[N]``, from a file with one length per line, with or without a heading."""
    lengths: list[int] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").splitlines(), 1):
        cell = line.strip()
        is_heading = not lengths and cell[:1].isalpha()
        if not cell or is_heading:
            continue
        if not cell.isdigit() or int(cell) < 1:
            raise ValueError(f"Line {number} of {path} is {line!r}, not a positive integer. Correct it.")
        lengths.append(int(cell))
    if not lengths:
        raise ValueError(f"{path} has no lengths. Write one positive integer on each line.")
    return np.array(lengths, np.int64)
