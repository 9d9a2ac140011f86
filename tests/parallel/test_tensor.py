"""Cut weights give the outputs and gradients of whole ones; what does not divide is named in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.parallel.sequence import apply_sequence_parallel, check_slots
from lightning_thd.parallel.tensor import (
    _skips_other_experts,
    apply_tensor_parallel,
    check_heads,
    model_plan,
)
from lightning_thd.precision import convert_linear
from tests.ranks import run_ranks
from tests.strategies.jobs import family_model
from tests.tiny import largest_error


class Net(nn.Module):
    """One layer of each style, biases included."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8, padding_idx=7)
        self.up = nn.Linear(8, 16)
        self.act = nn.PReLU()  # which no plan names
        self.norm = nn.LayerNorm(4)  # on every head of its own rank
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 12)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        heads = self.act(self.up(x)).unflatten(-1, (-1, 4))
        return self.head(x + self.down(self.norm(heads).flatten(-2)))


PLAN = {
    "embed": "embedding_rowwise",
    "up": "colwise",
    "norm": "replicated_with_grad_allreduce",
    "down": "rowwise",
    "head": "colwise_gather_output",
}


def outputs(net: Net) -> list[Tensor]:
    out = net(torch.tensor([[0, 3, 7, 11, 6, 5, 3]]))
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    grads: list[Any] = [parameter.grad for parameter in net.parameters()]
    return [out.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)]


def cut() -> list[Tensor]:
    net = Net()
    apply_tensor_parallel(net, PLAN, init_device_mesh("cpu", (dist.get_world_size(),)))
    assert isinstance(net.up.weight, DTensor)
    return outputs(net)


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_gradients(ranks: int) -> None:
    whole = outputs(Net())
    for of_rank in run_ranks(cut, ranks):
        for tensor, of_whole in zip(of_rank, whole, strict=True):
            torch.testing.assert_close(tensor, of_whole, rtol=1e-12, atol=1e-12)


def rounding_in_fp8() -> float:
    """Return how far a layer in emulated FP8, cut by inputs if there are ranks, is from one in fp32."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32))
    x = torch.randn(16, 64)
    plain = net(x)
    convert_linear(net, recipe="tensorwise", engine="torchao", emulate=True)
    if dist.is_initialized():
        apply_tensor_parallel(net, {"0": "rowwise_split_input"}, init_device_mesh("cpu", (2,)))
    return float((net(x) - plain).norm() / plain.norm())


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao", "ignore::UserWarning")  # torchao's own
def test_layers_in_fp8_stay_in_fp8() -> None:
    pytest.importorskip("torchao")
    rounding = rounding_in_fp8()
    for of_rank in run_ranks(rounding_in_fp8, 2):
        assert rounding / 2 < of_rank < 2 * rounding


class Scaled(nn.Linear):
    """A layer that does more than a product, as layers of adapters and of quantisation in training do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class Experts(nn.Module):
    """Experts that see all tokens, scaled before, as Llama 4's do."""

    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8, 8))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.bmm(hidden, self.weight)


def net_with(**parts: Any) -> Net:
    """Return a ``Net`` some of whose parts are others."""
    net = Net()
    for name, part in parts.items():
        setattr(net, name, part)
    return net


def embedding(**options: Any) -> nn.Embedding:
    return nn.Embedding(16, 8, **options)


def net_with_tied_head() -> Net:
    net = Net()
    net.head.weight = net.embed.weight
    return net


def net_with_computed_weight() -> Net:
    net = Net()
    weight_norm(net.up)
    return net


def net_with_patched_forward() -> Net:
    net = Net()
    net.up.forward = lambda x: x  # type: ignore[method-assign]
    return net


def net_with_norm_over_heads() -> Net:
    block: Any = nn.Module()
    block.q_proj = nn.Linear(8, 8)
    block.q_norm = nn.LayerNorm((2, 4))
    block.head_dim = 4
    return net_with(block=block)


def three_experts() -> nn.Module:
    experts: Any = family_model("qwen3_moe").model.layers[0].mlp.experts
    experts.num_experts = 3
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(parameter[:3].detach()))
    return nn.ModuleDict({"experts": experts})


# A module, a plan that two ranks cannot run on it, and a part of the message.
REFUSED: list[tuple[Callable[[], nn.Module], dict[str, str], str]] = [
    (Net, {"layer.*": "colwise"}, "No module of Net matches the tensor-parallel plan ['layer.*']"),
    (Net, {"up": "diagonal"}, "asks for 'diagonal' of 'up'; supported are colwise, rowwise"),
    (
        Net,
        {"norm": "colwise"},
        "norm is a LayerNorm, whose forward may do more than a product with a weight of its own",
    ),
    (
        lambda: net_with(up=nn.Linear(8, 15)),
        {"up": "colwise"},
        "up has 15 output features, which 2 tensor-parallel ranks do not divide; wanted a multiple of 2",
    ),
    (
        lambda: net_with(embed=nn.Embedding(13, 8)),
        {"embed": "embedding_rowwise"},
        "embed has 13 rows, which 2 tensor-parallel ranks do not divide; wanted a multiple of 2. Pad",
    ),
    (
        lambda: net_with(embed=embedding(max_norm=1.0)),
        {"embed": "embedding_rowwise"},
        "embed is a Embedding, but the tensor-parallel plan cuts it as an nn.Embedding without max_norm",
    ),
    (
        lambda: net_with(embed=embedding(scale_grad_by_freq=True)),
        {"embed": "embedding_rowwise"},
        "nn.Embedding without max_norm and scale_grad_by_freq. Take it out of the plan",
    ),
    (
        net_with_tied_head,
        {"head": "colwise_gather_output"},
        "embed.weight is tied to a weight that the tensor-parallel plan cuts. Add",
    ),
    (
        lambda: net_with(down=Scaled(16, 8)),
        {"down": "rowwise"},
        "down is a Scaled, whose forward may do more than a product with a weight of its own",
    ),
    (
        net_with_computed_weight,
        {"up": "colwise"},
        "up is a ParametrizedLinear, whose forward may do more than a product with a weight of its own",
    ),
    (
        net_with_patched_forward,
        {"up": "colwise"},
        "up is a Linear, whose forward may do more than a product with a weight of its own",
    ),
    (
        net_with_norm_over_heads,
        {"block.q_proj": "colwise"},
        "block.q_norm (LayerNorm) has weights for all heads, which tensor parallelism cuts",
    ),
    (
        lambda: net_with(activation_sparsity=0.9),
        {"up": "colwise"},
        "(Net) has activation_sparsity=0.9: it compares",
    ),
    (Net, {"up": "moe_tp_experts"}, "up (Linear) does not keep its experts as parameters [num_experts, ...]"),
    (
        lambda: nn.ModuleDict({"experts": Experts()}),
        {"experts": "moe_tp_experts"},
        "experts (Experts) is not told which experts each token has chosen",
    ),
    (
        three_experts,
        {"experts": "moe_tp_experts"},
        "experts has 3 experts, which 2 tensor-parallel ranks do not divide; wanted",
    ),
]


def messages() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    texts = []
    for make, plan, _ in REFUSED:
        with pytest.raises(ValueError) as error:  # noqa: PT011  (the messages are compared by the caller)
            apply_tensor_parallel(make(), plan, mesh)
        texts.append(str(error.value))
    return texts


def test_messages() -> None:
    for texts in run_ranks(messages, 2):
        for text, (_, plan, part) in zip(texts, REFUSED, strict=True):
            assert part in text, plan


def test_plans_of_models() -> None:
    assert model_plan(family_model("qwen3"))["model.layers.*.self_attn.o_proj"] == "rowwise"
    assert model_plan(family_model("qwen3@2t"))["model.embed_tokens"] == "embedding_rowwise"
    with pytest.raises(
        ValueError, match="num_attention_heads=8, which 3 tensor-parallel ranks.*multiple of 3"
    ):
        check_heads(nn.Sequential(family_model("qwen3")), 3, {"0.model.layers.*.self_attn.q_proj": "colwise"})
    check_heads(family_model("qwen3"), 3, {"model.layers.*.self_attn.q_proj": "colwise_gather_output"})


def test_slots_under_sequence_parallelism() -> None:
    check_slots(12, 4)
    with pytest.raises(ValueError, match=r"13 slots over 4.*multiple of 4.*THDBatch.collate pads.*align"):
        check_slots(13, 4)


def test_models_that_sequence_parallelism_does_not_know() -> None:
    group: Any = None  # not reached
    with pytest.raises(ValueError, match="Net has 0 layers, 0 norms.*sequence_parallel=False"):
        apply_sequence_parallel(Net(), group)
    model: Any = family_model("qwen3")
    model.model.project_in = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match="Qwen3Model holds project_in, a Linear. Set sequence_parallel=False"
    ):
        apply_sequence_parallel(model, group)
    del model.model.project_in
    model.model.layers[0].scale = nn.Parameter(torch.ones(1))
    with pytest.raises(
        ValueError, match=r"Qwen3DecoderLayer holds \['scale'\] itself.*sequence_parallel=False"
    ):
        apply_sequence_parallel(model, group)


def one_busy_expert(family: str) -> list[Tensor]:
    """Experts of which one gets every token, so that the other ranks' have no part in the output."""
    model: Any = family_model(family)
    experts = model.model.layers[0].mlp.experts
    if dist.is_initialized():
        apply_tensor_parallel(
            nn.ModuleDict({"experts": experts}),
            {"experts": "moe_tp_experts"},
            init_device_mesh("cpu", (dist.get_world_size(),)),
        )
    hidden = torch.linspace(-1, 1, 5 * 64, dtype=torch.float64).view(5, 64).requires_grad_()
    weights = torch.full((5, 1), 0.5, dtype=torch.float64).requires_grad_()
    out = experts(hidden, torch.ones(5, 1, dtype=torch.int64), weights)
    out.square().sum().backward()

    grads = [parameter.grad for parameter in experts.parameters()]  # none of them None, for FSDP2
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    return [out.detach(), hidden.grad, weights.grad, *whole]


# Whether a family's loop over experts skips those of other ranks. If not, their tokens are left out before.
@pytest.mark.parametrize(("family", "skips"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_ranks_whose_experts_get_no_token(family: str, skips: bool) -> None:
    experts: Any = family_model(family).model.layers[0].mlp.experts
    assert _skips_other_experts(experts, experts.num_experts) == skips

    one_process = one_busy_expert(family)
    for of_rank in run_ranks(one_busy_expert, 4, family, timeout_s=60.0):
        for tensor, of_process in zip(of_rank, one_process, strict=True):
            torch.testing.assert_close(tensor, of_process, rtol=1e-12, atol=1e-12)


def grouped(family: str, products: str) -> tuple[float, dict[str, Tensor]]:
    """A model's loss and gradients in fp32, with experts over the ranks if there are several."""
    model: Any = family_model(family, torch.float32)
    model.set_experts_implementation(products)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        apply_tensor_parallel(model, model_plan(model, 2), mesh)
        apply_sequence_parallel(model, mesh.get_group())
    loss = causal_lm_loss(model, THDBatch.collate([{"input_ids": range(1, n)} for n in (8, 13, 6)]))
    loss.backward()
    grads: dict[str, Any] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
    return float(loss.detach()), whole


@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "mixtral", "deepseek_v3")),
    ],
)
def test_grouped_products_of_experts_on_their_ranks(family: str) -> None:
    loss, gradients = grouped(family, "eager")
    for loss_of_rank, gradients_of_rank in run_ranks(grouped, 2, family, "grouped_mm"):
        assert loss_of_rank == pytest.approx(loss, rel=1e-5)  # fp32
        assert largest_error(gradients_of_rank, gradients) < 1e-4
