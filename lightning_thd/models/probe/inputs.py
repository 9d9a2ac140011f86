"""A model -> the random pack it is probed with, the function that calls it, and its state kept."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd.batch import THDBatch
from lightning_thd.models.pack import packed

Forward = Callable[[nn.Module, THDBatch], Any]
LENGTHS = (7, 1, 16, 3, 8)


def slots_of(batch: THDBatch, index: int) -> slice:
    """Return the slots of one sequence of a batch."""
    start = sum(batch.lengths[:index])
    return slice(start, start + batch.lengths[index])


def random_pack(model: nn.Module, vocab_size: int | None, lengths: Sequence[int], seed: int) -> THDBatch:
    """Build a pack of random ordinary tokens on the model's device."""
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(
            f"lengths={tuple(lengths)}: a leak needs at least two sequences of at least one token, for "
            f"example lengths={LENGTHS}."
        )
    config = text_config(getattr(model, "config", None))
    size = vocab_size or getattr(config, "vocab_size", None)
    if size is None or size < 8:
        raise ValueError(
            f"vocab_size={size} of {type(model).__name__}: pass the number of tokens, at least 8, as "
            "check_packing(model, vocab_size=...)."
        )
    ordinary = _ordinary_tokens(model, size)
    generator = torch.Generator().manual_seed(seed)
    picked = [ordinary[torch.randint(len(ordinary), (n,), generator=generator)] for n in lengths]
    return THDBatch.collate([{"input_ids": ids} for ids in picked]).to(embedding_of(model).weight.device)


def _ordinary_tokens(model: nn.Module, vocab_size: int) -> Tensor:
    """Return all token ids but those a config gives a meaning, such as an image's placeholder."""
    config = getattr(model, "config", None)
    special: set[int] = set()
    for source in (config, text_config(config)):
        for name, value in vars(source).items() if source is not None else ():
            if name.endswith(("token_id", "token_ids", "token_index")):
                special.update(value if isinstance(value, list | tuple) else [value])
    tokens = torch.arange(vocab_size)
    meant = torch.tensor([token for token in special if isinstance(token, int)], dtype=torch.int64)
    return tokens[~torch.isin(tokens, meant)]


def text_config(config: Any) -> Any:
    """Return the config of the language model inside a config."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def embedding_of(model: nn.Module) -> nn.Embedding:
    """Return the token embedding of a model, at whose output gradients are measured."""
    get = getattr(model, "get_input_embeddings", None)
    found: Any = get() if get is not None else None
    if found is None:
        found = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if not hasattr(found, "weight"):
        raise ValueError(
            f"{type(model).__name__} has no nn.Embedding to find its inputs at. Give it a "
            "get_input_embeddings()."
        )
    embedding: nn.Embedding = found
    return embedding


@contextmanager
def undisturbed(model: nn.Module) -> Generator[None]:
    """Switch the model to eval mode inside this context, and restore modes and random state after it.

    A compiled model runs as it is written: its graphs would pass by the hooks that look inside.
    """
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(0)
            yield
    finally:
        for module, flag in training.items():
            module.training = flag


def default_forward(model: nn.Module) -> Forward:
    """Return the function that calls a model on a batch, for users who gave none."""
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        return lambda model, batch: model(batch)

    def forward(model: nn.Module, batch: THDBatch) -> Any:
        with packed(batch):
            return model(**batch.hf_kwargs())

    return forward
