from __future__ import annotations

import contextlib
import copy
import io
from types import SimpleNamespace
from typing import Any

import accelerate.utils
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.nn import functional as F

from lightning_thd import _user_code
from lightning_thd.loss import causal_lm_logprobs, causal_lm_loss
from tests.loss.families import VOCAB, build
from tests.loss.support import gradients, make_batch, oracle
from tests.ranks import run_ranks

LENGTHS = [(5, 9, 1, 13), (3, 17, 8)]


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(((ours[k] - v).norm() / v.norm().clamp_min(1e-9)).item() for k, v in theirs.items())


def mean_over_ranks(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the mean of both ranks' losses, by the model's own logits on one rank."""
    total = torch.stack([oracle(model, make_batch(lengths=lengths)) for lengths in LENGTHS]).mean()
    return gradients(model, total)


def run_fsdp_cases() -> list[float]:
    """The root holds the head; the head by itself, freed after forward; a tied head."""
    return [
        run_fsdp(*case)
        for case in (("Granite", False, False), ("Granite", True, True), ("Qwen3", False, True))
    ]


def run_fsdp(name: str, own_head: bool, reshard: bool) -> float:
    from torch.distributed.fsdp import fully_shard

    model = build(name)
    expected = mean_over_ranks(copy.deepcopy(model))
    for layer in model.model.layers:
        fully_shard(layer)
    if own_head:
        fully_shard(model.lm_head, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=reshard)
    errors = []
    for _ in range(2):
        model.zero_grad()
        causal_lm_loss(model, make_batch(lengths=LENGTHS[dist.get_rank()])).backward()
        full = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        errors.append(worst(full, expected))
    model.zero_grad()
    logp = causal_lm_logprobs(model, make_batch(lengths=LENGTHS[dist.get_rank()])).logp
    (-logp.sum() * make_batch(lengths=LENGTHS[dist.get_rank()]).loss_scale).backward()
    full = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    return max(*errors, worst(full, expected))


def test_fsdp2() -> None:
    for errors in run_ranks(run_fsdp_cases, 2):
        assert max(errors) < 1e-12


def run_ddp() -> float:
    model = build("Gemma2")
    expected = mean_over_ranks(copy.deepcopy(model))
    wrapped = nn.parallel.DistributedDataParallel(model)
    errors = []
    for _ in range(3):
        wrapped.zero_grad()
        causal_lm_loss(wrapped, make_batch(lengths=LENGTHS[dist.get_rank()])).backward()
        errors.append(worst({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected))
    return max(errors)


def test_ddp() -> None:
    assert max(run_ranks(run_ddp, 2)) < 1e-12


def run_tensor_parallel_styles() -> list[tuple[float, float]]:
    return [run_tensor_parallel(style) for style in ("replicated output", "sharded output", "transformers")]


def run_tensor_parallel(style: str) -> tuple[float, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = build("Granite")
    batch = make_batch(ignored=0.3)
    total = oracle(model, batch)
    expected = gradients(model, total)
    model.zero_grad()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    if style == "replicated output":
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    elif style == "sharded output":
        parallelize_module(
            model, mesh, {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        )
    else:  # transformers' own, over the whole model
        from transformers.distributed.configuration_utils import DistributedConfig

        meshes: Any = SimpleNamespace(get_mesh=lambda name: mesh)
        model.maybe_distribute_model(model, DistributedConfig(tp_size=2), meshes)  # type: ignore[operator]
    loss = causal_lm_loss(model, batch)
    loss.backward()
    assert isinstance(model.lm_head.weight, DTensor)
    of_shards = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        of_shards[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return abs(loss.item() - total.item()), worst(of_shards, expected)


def test_tensor_parallel_heads() -> None:
    for errors in run_ranks(run_tensor_parallel_styles, 2):
        assert max(map(max, errors)) < 1e-12


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # peft's, about transformers 5
@pytest.mark.parametrize("kind", ["lora", "two adapters", "modules_to_save", "dora", "tokens"])
def test_peft(kind: str) -> None:
    peft = pytest.importorskip("peft")
    options: dict[str, Any] = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj", "lm_head"]}

    if kind == "modules_to_save":
        options |= {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    elif kind == "dora":
        options["use_dora"] = True
    elif kind == "tokens":
        options |= {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5, 7]}

    family = "Qwen3" if kind == "tokens" else "Granite"  # whose embedding is tied
    model = peft.get_peft_model(build(family), peft.LoraConfig(**options)).double()

    if kind == "two adapters":
        model.add_adapter("other", peft.LoraConfig(**{**options, "r": 2}))
        model = model.double()
        model.base_model.set_adapter(["default", "other"])

    batch = make_batch(ignored=0.3)
    with contextlib.nullcontext() if kind == "modules_to_save" else pytest.warns(UserWarning, match="whole"):
        loss = causal_lm_loss(model, batch)
    assert worst(gradients(model, loss), gradients(model, oracle(model, batch))) < 1e-12

    with model.disable_adapter():
        torch.testing.assert_close(causal_lm_loss(model, batch), oracle(model, batch))


@pytest.mark.filterwarnings("ignore")  # torchao's, when it is imported
@pytest.mark.parametrize("how", ["int8", "float8 training", "quantised in training"])
def test_heads_of_torchao(how: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = build("Granite", torch.float32)
    batch = make_batch()
    plain = causal_lm_loss(model, batch)

    def wanted(_: nn.Module, name: str) -> bool:
        return name == "lm_head"

    if how == "quantised in training":
        fake = IntxFakeQuantizeConfig(torch.int4, group_size=32)
        quantization.quantize_(model, QATConfig(weight_config=fake, step="prepare"), filter_fn=wanted)
    elif how == "float8 training":
        convert_to_float8_training(
            model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: wanted(m, name)
        )
    else:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), filter_fn=wanted)
    loss = causal_lm_loss(model, batch)
    assert abs(loss.item() - plain.item()) > 1e-4
    assert worst(gradients(model, loss), gradients(model, oracle(model, batch))) < 1e-5


@pytest.mark.filterwarnings("ignore::FutureWarning")  # renamed in transformers 5.23, absent before
def test_autocast_and_checkpointing() -> None:
    model = build("Granite", torch.float32)
    batch = make_batch(ignored=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = causal_lm_loss(model, batch)
        logits = model(**batch.hf_kwargs()).logits[0].float()
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(logits, batch.targets, reduction="sum") * batch.loss_scale
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    model = build("Llama").train()
    expected_gradients = gradients(model, oracle(model, batch))
    model.gradient_checkpointing_enable()
    assert worst(gradients(model, causal_lm_loss(model, batch)), expected_gradients) < 1e-12


def test_composable_checkpoints_of_parts_are_exact_and_of_the_whole_model_refused() -> None:
    model = build("Qwen3")
    batch = make_batch()
    expected = gradients(model, causal_lm_loss(model, batch))

    for names in (["model"], ["model.layers.0", "model.layers.1.mlp"]):
        checkpointed = build("Qwen3")
        for name in names:
            checkpoint(checkpointed.get_submodule(name))
        recomputed = gradients(checkpointed, causal_lm_loss(checkpointed, batch))
        assert worst(recomputed, expected) < 1e-12

    whole = build("Qwen3")
    checkpoint(whole)
    with pytest.raises(ValueError, match="is checkpointed as a whole by torch's composable checkpoint"):
        causal_lm_loss(whole, batch)

    outputs = whole(**batch.hf_kwargs(), labels=batch.targets[None], shift_labels=batch.targets[None])
    assert worst(gradients(whole, outputs.loss), expected) < 1e-5  # transformers computes its loss in fp32


def test_copies_and_pickles_of_a_used_model_work() -> None:
    model = build("Cohere")
    batch = make_batch()
    loss = causal_lm_loss(model, batch)
    assert "forward" not in model.__dict__
    assert "forward" not in model.get_output_embeddings().__dict__
    copied = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copied, torch.load(buffer, weights_only=False)):
        with torch.no_grad():
            other.get_output_embeddings().weight.zero_()
        assert causal_lm_loss(other, batch).item() == pytest.approx(torch.tensor(VOCAB).log().item())
    torch.testing.assert_close(causal_lm_loss(model, batch), loss)


class RoundsOutputs(nn.Module):
    """Does what FSDP2 does with an ``output_dtype``, which Accelerate sets for bf16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, **kwargs: Any) -> dict[str, Tensor]:
        return {name: value.bfloat16() for name, value in self.module(**kwargs).items()}


def test_a_loss_is_not_rounded_by_an_output_dtype_nor_positions_by_narrow_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_user_code, "is_users", lambda file: False)  # FSDP2 is no user's code
    model = build("Llama").train()
    batch = make_batch(lengths=LENGTHS[1])
    loss = causal_lm_loss(model, batch)
    expected = gradients(model, loss)
    model.model.rotary_emb.to(torch.bfloat16)  # FSDP1 does so to all buffers of its mixed precision
    rounded = causal_lm_loss(RoundsOutputs(model), batch)
    assert torch.equal(loss, rounded)
    of_rounded = gradients(model, rounded)
    torch.testing.assert_close(of_rounded, expected, rtol=0, atol=0)


def test_an_error_inside_the_model_leaves_it_as_it_was() -> None:
    model = build("Llama")
    batch = make_batch()
    handle = model.model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        causal_lm_loss(model, batch)
    handle.remove()
    assert model(**batch.hf_kwargs()).logits.shape == (1, 28, VOCAB)
    causal_lm_loss(model, batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("how", ["whole", "in place", "layers", "regions"])
def test_compiled_models(how: str) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build("Gemma2", torch.float32)
    plain = copy.deepcopy(model)
    compiled: Any = model
    if how == "whole":
        compiled = torch.compile(model, backend="aot_eager")
    elif how == "in place":
        model.compile(backend="aot_eager")
    elif how == "regions":
        compiled = accelerate.utils.compile_regions(model, backend="aot_eager")
    else:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    for lengths in [(5, 9, 1, 13), (4, 10, 2, 12), (3, 11, 2, 12), (6, 10, 1, 11), (5, 9, 1, 13)]:
        batch = make_batch(lengths=lengths)
        of_compiled = gradients(model, causal_lm_loss(compiled, batch))
        assert worst(of_compiled, gradients(plain, oracle(plain, batch))) < 1e-5
    assert not torch._dynamo.utils.counters["recompile_limit"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= (12 if how == "regions" else 4)
