"""Layers that torch compiles, inside graphs and in eager training: how often, and that nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.callbacks.cuda_graph import make_buckets
from lightning_thd.cuda_graph import graphed_step
from lightning_thd.parallel.fsdp import layers_of
from tests.cuda_graph.support import gradients, graphed, random_batch, worst

# torch's compiler looks at .grad of the hidden states, which autograd warns of.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
LAYERS = 6


@pytest.fixture
def compiler() -> Iterator[CompileCounterWithBackend]:
    """A compiler that counts its graphs, and runs them by torch's own kernels."""
    torch._dynamo.reset()
    counters.clear()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def model_of() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "vocab_size": 100}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=LAYERS)
    return AutoModelForCausalLM.from_config(config, attn_implementation="thd").train()


def test_all_buckets_share_one_graph_and_nothing_is_compiled_afterwards(
    compiler: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = partial(graphed_step.compiled_layers, backend=compiler)
    monkeypatch.setattr(graphed_step, "compiled_layers", compiled)
    model = model_of()
    buckets = make_buckets((8, 12, 16), slots=128, max_seqlen=24)
    step = graphed(model, buckets=buckets, compile_layers=True)
    eager = []
    for seed in range(6):
        batch = random_batch(seed)
        found = gradients(model, step(batch))
        found = [x.clone() for x in found]
        wanted = gradients(model, causal_lm_loss(model, batch))
        assert worst(found, wanted) < 2e-6
        eager.append(batch.input_ids.numel() > 128)
    assert step.stats.replays == eager.count(False) > 2
    assert compiler.frame_count == 1
    assert dict(counters["graph_break"]) == {}
    assert all(layer._compiled_call_impl is None for layer in layers_of(model))


def test_layers_that_a_user_compiled_stay_compiled(compiler: CompileCounterWithBackend) -> None:
    model = model_of()
    for layer in layers_of(model):
        layer.compile(dynamic=True, backend=compiler)
    step = graphed(model, compile_layers=True)
    for seed in (0, 1):
        batch = random_batch(seed, count=4)
        found = [x.clone() for x in gradients(model, step(batch))]
        with torch.compiler.set_stance("force_eager"):
            assert worst(found, gradients(model, causal_lm_loss(model, batch))) < 2e-6
    assert step.stats.replays == 2
    assert all(layer._compiled_call_impl is not None for layer in layers_of(model))


def test_forty_packs_in_eager_training_need_one_graph(compiler: CompileCounterWithBackend) -> None:
    """12 layers or 6: one graph for all, no break, and no compilation after the first pack."""
    model = model_of()
    for layer in layers_of(model):
        layer.compile(dynamic=True, backend=compiler)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        count = int(torch.randint(2, 9, (1,), generator=generator))
        lengths = torch.randint(2, 40, (count,), generator=generator).tolist()
        batch = THDBatch.collate([{"input_ids": [5] * length} for length in lengths])
        causal_lm_loss(model, batch).backward()
    assert compiler.frame_count == 1
    assert dict(counters["graph_break"]) == {}
