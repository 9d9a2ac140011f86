"""``CausalLMModule``: compiled layers give the same numbers from one graph, whatever the packs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.module import CausalLMModule
from tests.ranks import run_ranks
from tests.tiny import sequences, tiny_llama


def count_graphs() -> int:
    compile_layer = nn.Module.compile  # in eager mode: what is traced is the same, and no C++ is built
    nn.Module.compile = lambda self, **kw: compile_layer(self, backend="eager", **kw)  # type: ignore[method-assign]
    samples = sequences(60)
    batches = [THDBatch.collate(samples[6 * i : 6 * i + 6]) for i in range(10)]
    eager = tiny_llama().eval()
    module = CausalLMModule(tiny_llama(), compile="layers")
    module.configure_model()
    module.configure_model()
    assert module.model is not None
    module.model.load_state_dict(eager.state_dict())
    module.model.eval()
    for batch in batches:
        assert torch.equal(causal_lm_loss(module.model, batch), causal_lm_loss(eager, batch))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_layers_share_one_graph_over_all_packs() -> None:
    # In a process of its own: once a batch was cut for context parallelism, attention breaks graphs.
    assert run_ranks(count_graphs, 1) == [1]


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="compile='model'; wanted 'off' or 'layers'"):
        CausalLMModule(tiny_llama(), compile="model")  # type: ignore[arg-type]
