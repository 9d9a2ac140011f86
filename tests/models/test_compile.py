"""torch.compile: right on every pack, and a bounded number of graphs however the lengths change."""

from __future__ import annotations

import gc
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounterWithBackend

from lightning_thd._static import shapes_are_static, static_shapes
from lightning_thd.batch import THDBatch
from lightning_thd.models import packed, register_thd
from tests.models import matrix
from tests.models.families import build

register_thd()
# The same 35 slots cut in ever other ways: number of sequences and longest sequence both change.
CUTS = ((7, 1, 16, 3, 8), (5, 12, 18), (1, 9, 17, 2, 2, 2, 2), (35,), (20, 15), (3, 4, 5, 6, 7, 10), (2, 33))

# torch.compile looks at .grad of the tensors a graph starts with; after a graph break those are no leaves.
NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def graphs_after_each_pack(model: Any, *, fullgraph: bool, told: bool) -> list[int]:
    """Train on every cut, compiled and not, and count the graphs; the gradients must agree."""
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
        # Older transformers read the experts' sizes in the backward pass, which torch cannot trace.
        model.set_experts_implementation("batched_mm")

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=fullgraph)
    counts = []

    for seed, lengths in enumerate(CUTS):
        batch = THDBatch.collate(matrix.samples(lengths, seed))
        gradients = []
        for run in (compiled, model):
            model.zero_grad()
            with packed(batch) if told else nullcontext():
                logits = run(**batch.hf_kwargs()).logits
            logits.square().mean().backward()
            gradients.append([logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        largest = max(gradient.abs().max().item() for gradient in gradients[1][1:])
        names = [name for name, p in model.named_parameters() if p.grad is not None]
        for name, ours, theirs in zip(["logits", *names], *gradients, strict=True):
            # A key bias without rotary positions has a gradient of rounding alone. A decay's is a sum over
            # slots that cancels: Qwen3-Next's is up to 4.7e-5 away from fp64, compiled or not.
            rounding = theirs.abs().max().item() < 1e-6 * largest
            limit = 5e-5 if name.endswith(("A_log", "dt_bias")) else 1e-5
            assert matrix.relative_error(ours, theirs, 1e-3 * largest if rounding else 1e-6) <= limit
        counts.append(counter.frame_count)

    return counts


@pytest.mark.parametrize("told", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(x, marks=pytest.mark.slow) for x in ("stablelm", "gemma3", "gpt_oss"))]
)
def test_attention_models_compile_whole_and_twice_at_most(name: str, told: bool) -> None:
    model: Any = build(name, "thd").train()
    if name == "llama":  # one layer of the two, which are alike
        model.model.layers = model.model.layers[:1]
    counts = graphs_after_each_pack(model, fullgraph=True, told=told)
    # One graph for the first lengths and one for all others; the hook that reads the arguments has two of
    # its own.
    assert counts[-1] <= (2 if told else 4)
    assert counts[-1] == counts[1]


@NON_LEAF
@pytest.mark.slow
@pytest.mark.parametrize(("name", "told"), [("mamba2", False), ("mamba2", True), ("qwen3_next", False)])
def test_state_space_models_compile_around_their_layers(name: str, told: bool) -> None:
    counts = graphs_after_each_pack(build(name, "thd").train(), fullgraph=False, told=told)
    assert counts[-1] == counts[-3] <= 12


def test_recorded_steps_are_known_without_a_graph_break() -> None:
    compiled = torch.compile(shapes_are_static, fullgraph=True, backend="eager")
    with static_shapes():
        assert compiled()
    assert not compiled()


def test_a_copy_compiled_before_its_first_call_is_refused_too() -> None:
    torch._dynamo.reset()
    model: Any = build("llama", "thd")
    model.model.layers[1].memory = torch.nn.Sequential(torch.nn.Conv1d(32, 32, 4, groups=32))
    model = pickle.loads(pickle.dumps(model))  # the original is gone
    gc.collect()
    (batch, _) = matrix.packs()
    with pytest.raises(ValueError, match=r"mixes tokens by a convolution or a state"):
        torch.compile(model, backend="eager")(**batch.hf_kwargs())


def test_a_compiled_model_does_not_take_a_pack_for_a_row() -> None:
    torch._dynamo.reset()
    model = build("llama", "thd").eval()
    (batch, _) = matrix.packs()
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(RuntimeError, match="positions restart inside a row"), torch.no_grad():
        compiled(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None])
