"""Hooks that public methods of torch register are listed and copied, wherever torch keeps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_thd._hooks import CALLED, Kind, attributes_of_hooks, hooks_of, registry_of


def nothing(*_: Any) -> None:
    """Stand for a user's hook."""


@pytest.mark.parametrize("kind", CALLED)
def test_hooks_of_a_kind_are_listed_in_order(kind: Kind) -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    hooks = [lambda *_: None for _ in range(3)]
    for module, hook in zip((modules[0], modules[1], modules[0]), hooks, strict=True):
        getattr(module, f"register_{kind}_hook")(hook)
    assert hooks_of(modules, kind) == [hooks[0], hooks[2], hooks[1]]
    others: list[Kind] = [other for other in CALLED if other != kind]
    assert hooks_of(modules, *others) == []


def test_a_module_with_the_attributes_of_another_calls_its_hooks() -> None:
    calls: list[str] = []
    source = nn.Linear(2, 2)
    copy = nn.Linear(2, 2)
    source.register_forward_pre_hook(lambda *_, **__: calls.append("pre"), with_kwargs=True)
    source.register_forward_hook(lambda *_, **__: calls.append("post"), with_kwargs=True, always_call=True)
    source.register_full_backward_hook(lambda *_: calls.append("backward"))
    saved: Any = source.register_state_dict_post_hook
    saved(lambda *_: calls.append("saved"))
    for name in attributes_of_hooks():
        copy.__dict__[name] = source.__dict__[name]
    copy(torch.ones(1, 2, requires_grad=True)).sum().backward()
    copy.state_dict()
    assert calls == ["pre", "post", "backward", "saved"]
    assert not {"_parameters", "_buffers", "_modules", "training"} & {*attributes_of_hooks()}


def test_a_torch_that_keeps_hooks_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(nn.Module):
        def register_forward_hook(self, hook: Any, **_: Any) -> Any:
            return hook

    registry_of.cache_clear()
    attributes_of_hooks.cache_clear()
    monkeypatch.setattr(nn, "Module", Elsewhere)
    with pytest.raises(RuntimeError, match="keeps the hooks of register_forward_hook where"):
        registry_of("forward")
    with pytest.raises(RuntimeError, match="keeps the hooks of register_forward_hook where"):
        attributes_of_hooks()
