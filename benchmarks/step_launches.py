"""Kernel launches of a training step of 125M by count: eager, and with layers that inductor compiles.

``python -m benchmarks.step_launches`` runs 12 small layers of Qwen3 and a fused AdamW on an imagined CUDA
device, with the loss in its kernels, and counts the operators that would launch a kernel. The tiles of the
loss are counted at 8,192 tokens x 32,000. A compiled layer is counted in the code that inductor writes for an
H100: Triton kernels, products and attention. That needs triton, which ``make test-kernels`` installs; nothing
is compiled further. ``--operators`` prints every operator.
"""

from __future__ import annotations

import argparse
import re
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import loss_counts, results
from benchmarks.loss_counts import _FREE
from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd._imports import installed

LAYERS = 12
SIZES = (8192, 768, 32_000)  # tokens, hidden size, vocabulary
SMALL = (128, 64, 512)
HEAD = 64  # the size of a head
LENGTHS = (20, 40, 4, 16, 16, 12, 10, 10)  # 8 documents in 128 tokens
GOAL = 750  # with compiled layers
GOAL_EAGER = 2081  # as many as on 2026-11-28, when the loss ran in torch's operators
# Operators that launch nothing, beside those of the losses: further views, and what happens on the host.
_VIEWS = {
    "_reshape_alias", "_unsafe_view", "chunk", "empty_strided", "new_empty_strided", "permute",
    "record_stream", "reshape", "split", "split_with_sizes", "unbind", "unfold", "view_as",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts the operators on CUDA tensors that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if name not in _FREE | _VIEWS and any(x.is_cuda for x in tensors):
            self.found[name] += 1
        return out


def build(layers: int, hidden: int) -> Any:
    """A Qwen3 of so many layers in bf16 on the device."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // HEAD,
        head_dim=HEAD,
        vocab_size=SMALL[2],
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="thd", dtype=torch.bfloat16)
    return model.train()


def pack() -> THDBatch:
    """A small pack on the device; the number of launches outside of the loss does not depend on its size."""
    return THDBatch.collate([{"input_ids": torch.zeros(n, dtype=torch.long)} for n in LENGTHS]).to("cuda")


def tiles() -> Counter[str]:
    """Count the launches that the loss of the large pack has beyond those of the small one."""
    found = Counter(loss_counts.count(loss_counts.scalar, kernels=True, sizes=SIZES).launches)
    found.subtract(loss_counts.count(loss_counts.scalar, kernels=True, sizes=SMALL).launches)
    return found


def eager(layers: int) -> Counter[str]:
    """Count the launches of an eager step: forward, backward and AdamW."""
    from tests.loss.forced import kernels_forced

    with kernels_forced(interpreted=False):
        model = build(layers, SMALL[1])
        batch = pack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def step() -> None:
            causal_lm_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        step()  # makes the optimizer's states
        with Launches() as launches:
            step()
    return launches.found


class _Written(Exception):
    """The code is there; nothing is to be compiled."""


def compiled_layer() -> dict[str, Counter[str]]:
    """Count the launches in inductor's code of a layer, forward and backward."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering

    from tests.loss.forced import kernels_forced

    launches: dict[str, Counter[str]] = {}
    code: list[str] = []

    def write(self: Any, *_: Any, **__: Any) -> None:
        written, _ = self.codegen()
        code.append(getattr(written, "value", written))
        raise _Written

    def compiler(part: str) -> Callable[..., Any]:
        def lower(graph: Any, inputs: Any, **_: Any) -> Any:
            try:
                compile_fx_inner(graph, inputs, is_backward=part == "backward")
            except Exception:
                if not code:  # inductor wraps the exception that ends it
                    raise
            launches[part] = launches_of(code.pop())
            return make_boxed_func(graph.forward)

        return lower

    backend: Any = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    with (
        _imagined_for_triton(),
        mock.patch("torch._inductor.scheduler.has_triton", return_value=True),  # asked before, it says no
        mock.patch.object(GraphLowering, "compile_to_module", write),
        kernels_forced(interpreted=False),
    ):
        torch.manual_seed(0)
        model = build(1, SIZES[1])
        (layer,) = model.model.layers
        assert isinstance(layer, nn.Module)
        layer.compile(dynamic=False, backend=backend)
        causal_lm_loss(model, pack()).backward()
    return launches


def launches_of(code: str) -> Counter[str]:
    """Count the launches in code that inductor wrote: its own kernels, products, and operators of torch.

    ``triton_poi_fused_0.run(a, b)`` and ``extern_kernels.mm(a, b, out=c)`` become one "triton" and one "mm".
    """
    call = code[code.rindex("def call(") :]
    own = re.findall(r"triton_\w+\.run\(", call)
    products = re.findall(r"extern_kernels\.(\w+)\(", call)
    operators = re.findall(r"torch\.ops\.aten\.(\w+)\.\w+\(", call)
    launching = [name for name in operators if name not in _FREE | _VIEWS]
    return Counter(["triton" for _ in own] + products + launching)


def _imagined_for_triton() -> Any:
    """Let triton and inductor see an H100."""
    from torch._dynamo import device_interface
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    properties = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65_536,
        total_memory=80 * 2**30, L2_cache_size=50 * 2**20, shared_memory_per_block=49_152,
        shared_memory_per_block_optin=232_448, shared_memory_per_multiprocessor=233_472, is_integrated=0,
        gcnArchName="",
    )  # fmt: skip
    active = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0,
        set_current_device=lambda *_: None,
        get_device_capability=lambda *_: (9, 0),
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    driver.set_active(active)
    told = staticmethod(lambda *_, **__: properties)
    patches = mock.patch.multiple(
        torch.cuda, create=True, get_device_properties=told, _get_device_properties=told
    )
    for interface in (device_interface.CudaInterface, device_interface.CudaInterface.Worker):
        interface.get_device_properties = told  # type: ignore[method-assign, assignment]
    return patches


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--operators", action="store_true", help="print every operator")
    arguments = parser.parse_args(argv)
    from tests.imagined.gpu import imagined_gpu

    of_tiles = tiles()
    with imagined_gpu(capability=(9, 0), name="NVIDIA H100 80GB HBM3"):
        whole = eager(LAYERS)
        layer = whole - eager(LAYERS - 1)
        whole.update(of_tiles)
        print(f"eager: {whole.total()} launches, of which a layer has {layer.total()}")
        if arguments.operators:
            for name, times in whole.most_common():
                print(f"  {name:24} {times:6}, {layer[name]} a layer")

        results.less(
            f"launches of a 125M step, eager, {LAYERS} layers, by count",
            whole.total(),
            "launches",
            GOAL_EAGER,
            precision="bf16",
        )
        if not installed("triton"):
            print("compiled: triton is not installed: make test-kernels installs it", file=sys.stderr)
            return
        parts = compiled_layer()
    of_layer = sum(found.total() for found in parts.values())
    compiled = whole.total() - LAYERS * (layer.total() - of_layer)
    print(f"compiled: {compiled} launches, of which a layer has {of_layer}")
    for part, found in parts.items():
        print(f"  {part}: {', '.join(f'{times} {name}' for name, times in found.most_common())}")
    results.less(
        f"launches of a 125M step with compiled layers, {LAYERS} layers, by count",
        compiled,
        "launches",
        GOAL,
        peer=whole.total(),
        precision="bf16",
    )


if __name__ == "__main__":
    main()
