"""``CausalLMModule``: compiled layers give the same numbers from one graph, whatever the packs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.module import CausalLMModule
from tests.tiny import sequences, tiny_llama


# Dynamo looks at .grad of what a layer is given (torch 2.13).
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_share_one_graph_over_all_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_layer = nn.Module.compile  # in eager mode: what is traced is the same, and no C++ is built
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kw: compile_layer(self, backend="eager", **kw))
    samples = sequences(60)
    batches = [THDBatch.collate(samples[6 * i : 6 * i + 6]) for i in range(10)]
    eager = tiny_llama().eval()
    module = CausalLMModule(tiny_llama(), compile="layers")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module.configure_model()
    module.configure_model()
    assert module.model is not None
    module.model.load_state_dict(eager.state_dict())
    module.model.eval()
    for batch in batches:
        assert torch.equal(causal_lm_loss(module.model, batch), causal_lm_loss(eager, batch))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="compile='model'; wanted 'off' or 'layers'"):
        CausalLMModule(tiny_llama(), compile="model")  # type: ignore[arg-type]
