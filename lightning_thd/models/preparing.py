"""A model of transformers -> the same model, prepared to run on packs.

``watch_attention`` replaces the one method of transformers that chooses a model's attention. transformers
calls it when a model is built or switched, so every model with "thd" is prepared there, or refused.

A model with "thd" first gets a class that announces its packs (``adapt`` with the adapter of ``announce``),
then the models around it get "thd" (``spread_thd`` in ``prepare``), and then its layers are prepared
(``prepare_layers``). ``watch_switching`` is for a model without "thd", which may be switched to it later.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from lightning_thd._versions import warn_of_newer
from lightning_thd.attention.support import Backend, check_backend
from lightning_thd.models.adapted import adapt
from lightning_thd.models.announce import Announcing, stock_models_around
from lightning_thd.models.layers import prepare_layers
from lightning_thd.models.offload import offload_inputs
from lightning_thd.models.pack import BACKEND
from lightning_thd.models.refusals import (
    is_tower,
    keeps_own_attention,
    refuse_model_around,
    refuse_own_attention,
)
from lightning_thd.models.switching import (
    NAME,
    choose_attention,
    is_transformers_model,
    language_config,
    mentions_thd,
    spread_thd,
)
from lightning_thd.models.tiles import tile_mlps
from lightning_thd.models.unswitchable import watch_switching


def prepare(
    model: nn.Module,
    *,
    mlp_tile: int | None = None,
    offload: bool | None = None,
    backend: Backend | None = None,
) -> nn.Module:
    """Prepare the models with "thd" in a module to run on packs.

    A model is prepared when it is built with ``attn_implementation="thd"`` or switched to it. Losses,
    strategies and integrations call this too. Call it yourself after you changed a model by hand: you
    assigned "thd" to its config, replaced layers, or wrapped layers in activation checkpoints. More calls do
    no harm.

    Args:
        model: a model of transformers, or any module around models of transformers (DDP, FSDP, PEFT,
            torch.compile, a LightningModule).
        mlp_tile: run MLPs and experts in tiles of at most so many tokens, and run each tile again in the
            backward pass: memory for a fifth to a third more FLOPs. Set it before weights are cut over
            ranks. Later calls without it keep it.
        offload: inputs of checkpointed layers wait in pinned CPU memory for their backward pass, copied on a
            side stream of a GPU. Call ``model.gradient_checkpointing_enable()`` first.
        backend: the attention kernel of all layers: "torch", "flash", "te", "efficient", "portable" or "cpu",
            as in ``varlen_attention``. A call that it cannot run raises. "auto" is the fastest that supports
            a call, as if nothing was chosen. Later calls without it keep it.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: a model holds a layer that would mix the sequences of a pack, or no model has "thd"; or
            ``mlp_tile`` is below 1, differs from an earlier call's, or finds no MLP that can run in tiles; or
            ``offload`` finds no checkpointed layer; or ``backend`` is not known. Each of these three needs a
            model of transformers.
    """
    models: list[Any] = [module for module in model.modules() if is_transformers_model(module)]
    if backend is not None:
        check_backend(backend)
    options = {"mlp_tile": mlp_tile, "offload": offload or None, "backend": backend}
    chosen = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    if not models and chosen:
        raise ValueError(
            f"{chosen[0]} is for models of transformers, but {type(model).__name__} holds none. Pass the "
            "model after it is built, as at the end of configure_model, or leave the option out."
        )

    asked = [inner for inner in models if mentions_thd(inner.config)]
    if models and not asked:
        raise ValueError(
            f"{type(models[0]).__name__} runs attn_implementation={models[0].config._attn_implementation!r}, "
            "so there is nothing to prepare. Build it with attn_implementation='thd', or call "
            "model.set_attn_implementation('thd')."
        )

    for inner in asked:
        if not keeps_own_attention(inner):
            _announce_packs(inner)

    for inner in asked:
        spread_thd(inner, follow=False)
        prepare_layers(inner)

    for outer in models:
        inside = (inner for inner in asked if any(child is inner for child in outer.modules()))
        inner = next(
            (inner for inner in inside if isinstance(inner, Announcing) and not is_tower(inner)), None
        )
        if inner is not None and not isinstance(outer, Announcing):
            refuse_model_around(outer, inner)

    tile_mlps(asked, mlp_tile)
    offload_inputs(asked, offload)
    _choose_backend(asked, backend)
    return model


def _choose_backend(models: Iterable[nn.Module], backend: Backend | None) -> None:
    """Note a user's attention kernel in all layers of models; None keeps what an earlier call has noted."""
    for model in models:
        chosen = model.__dict__.get(BACKEND) if backend is None else backend
        if chosen is not None:
            for module in model.modules():
                module.__dict__[BACKEND] = chosen


def prepare_if_asked(module: nn.Module | None) -> None:
    """Prepare the models with "thd" in a module, if there are any."""
    models: list[Any] = []
    if module is not None:
        models = [inner for inner in module.modules() if is_transformers_model(inner)]
    if any(mentions_thd(inner.config) for inner in models):
        assert module is not None
        prepare(module)


def is_prepared(model: object) -> bool:
    """Return whether a model of transformers announces its packs."""
    return isinstance(model, Announcing)


def _announce_packs(model: Any) -> None:
    if model.config._attn_implementation == NAME:
        refuse_own_attention(model)
    if not isinstance(model, Announcing):
        warn_of_newer()
        adapt(model, Announcing)


def _announce_around(model: Any) -> None:
    """Prepare the models that hold a language model which is switched to "thd" as a part of them."""
    for outer in stock_models_around(model):
        if language_config(outer.config) is model.config:
            choose_attention(outer.config, NAME)
            _announce_packs(outer)
            prepare_layers(outer)


def watch_attention(base: Any) -> None:
    """Prepare every model of class ``base`` (PreTrainedModel) that is built with "thd" or switched to it."""
    choose: Callable[..., str] = base.get_correct_attn_implementation
    names = list(inspect.signature(choose).parameters)
    if names[:2] != ["self", "requested_attention"]:
        raise TypeError(
            f"get_correct_attn_implementation takes {', '.join(names)}; wanted requested_attention first"
        )

    @functools.wraps(choose)
    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> str:
        chosen = choose(self, *args, **kwargs)
        if chosen == NAME and keeps_own_attention(self):
            return choose(self, None)  # a vision tower whose attention has no "thd"
        if chosen == NAME:
            refuse_own_attention(self)
        if chosen != NAME and not mentions_thd(self.config):
            watch_switching(self)
            return chosen

        prepared_before = isinstance(self, Announcing)
        for inner in self.modules():  # also models that share the config, which transformers skips
            if is_transformers_model(inner) and inner.config is self.config:
                _announce_packs(inner)

        if any(True for _ in self.children()):  # else ``post_init`` does it when the layers are built
            # A model that is being built, or had "thd" before, is looked for at its first pack, if needed:
            # the search takes as long as many small steps.
            if chosen == NAME and not prepared_before:
                _announce_around(self)
            prepare_layers(self)
        return chosen

    # The row "attention chosen" of ``_patches``.
    base.get_correct_attn_implementation = get_correct_attn_implementation
