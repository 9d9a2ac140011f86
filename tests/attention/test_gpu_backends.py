"""Every GPU backend against the oracle, on strict doubles of its library: signatures, layouts, windows."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_thd.attention import entry, varlen_attention
from lightning_thd.attention.kernels import raw, torch_cuda
from lightning_thd.attention.spec import make_spec
from lightning_thd.attention.support import Request, choose
from lightning_thd.boundaries import KernelCall
from lightning_thd.flops.torch_counter import StepCounter
from lightning_thd.warnings import THDWarning
from tests.attention import standins
from tests.attention.oracle import dense_attention

# bf16 keeps 8 bits: out is rounded once, gradients go through products of a few rounded numbers.
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}
LENGTHS_Q = [1, 7, 0, 33, 3, 12]
LENGTHS_KV = [4, 3, 5, 9, 0, 12]
CASES = {
    "causal": ({}, (-1, 0)),
    "bidirectional": ({"causal": False}, (-1, -1)),
    "window": ({"window": 5}, (4, 0)),
    "two-sided": ({"window": (3, 2), "causal": False}, (3, 2)),
    "right only": ({"window": (-1, 20), "causal": False}, (-1, 20)),
    "left only": ({"window": (3, -1), "causal": False}, (3, -1)),
    "scale": ({"scale": 0.3}, (-1, 0)),
}


BACKENDS = ["torch", "flash2", "flash3", "flash3 tag", "flash4", "te", "efficient"]


def cu(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def install(patch: pytest.MonkeyPatch, backend: str) -> str:
    if backend in ("torch", "efficient"):
        install_here = standins.install_torch if backend == "torch" else standins.install_efficient
        install_here(patch)
        return backend
    standins.install(patch, backend)
    return "te" if backend == "te" else "flash"


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16().requires_grad_()


SIZES = [(4, 4, 16, 16), (6, 2, 24, 8), (4, 1, 20, 20)]


def is_sampled(case: str, extra: str, sizes: tuple[int, ...], cross: bool) -> bool:
    """Return whether a case is unmarked: every mask without extras, every extra without a window."""
    return sizes == SIZES[1] and cross and (not extra or case == "causal")


@pytest.mark.parametrize(
    ("case", "extra", "sizes", "cross"),
    [
        pytest.param(*one, marks=() if is_sampled(*one) else pytest.mark.slow)
        for one in product(CASES, ("", "sinks", "softcap"), SIZES, (False, True))
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_dense(
    on_cuda: pytest.MonkeyPatch, backend: str, case: str, extra: str, sizes: tuple[int, ...], cross: bool
) -> None:
    name = install(on_cuda, backend)
    heads, kv_heads, size, value_size = sizes
    lengths_kv = LENGTHS_KV if cross else LENGTHS_Q
    torch.manual_seed(0)
    q = normal(sum(LENGTHS_Q), heads, size)
    k = normal(sum(lengths_kv), kv_heads, size)
    v = normal(sum(lengths_kv), kv_heads, value_size)
    sinks = torch.randn(heads, requires_grad=True) if extra == "sinks" else None
    softcap = 2.0 if extra == "softcap" else None
    options, (left, right) = CASES[case]
    cu_seqlens_q = cu(LENGTHS_Q)
    cu_seqlens_kv = cu(lengths_kv) if cross else cu_seqlens_q

    def run() -> Tensor:
        longest = 33, 12 if cross else 33
        chosen = {"sinks": sinks, "softcap": softcap, "backend": name, **options}
        return varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_kv, *longest, **chosen)

    no_softcap = softcap and name in ("torch", "te", "efficient")
    ahead = name == "efficient" and case in ("two-sided", "right only", "left only")
    te_lacks = sinks is not None or size % 8 or (cross and (left, right) not in ((-1, -1), (-1, 0)))
    if no_softcap or ahead or (name == "te" and te_lacks):
        with pytest.raises(ValueError, match=r"backend='(torch|te|efficient)' cannot run this call"):
            run()
        return
    out = run()
    inputs = [q, k, v] + ([] if sinks is None else [sinks])
    expected, _ = dense_attention(
        q, k, v, LENGTHS_Q, lengths_kv,
        left=left, right=right, scale=options.get("scale"), softcap=softcap, sinks=sinks,
    )  # fmt: skip
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)
    grad = torch.randn(out.shape).bfloat16()
    got = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(expected, inputs, grad.double())
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=3e-2, atol=6e-2)


@pytest.mark.parametrize("backend", ["torch", "flash2"])
def test_one_query_or_no_key_a_sequence(on_cuda: pytest.MonkeyPatch, backend: str) -> None:
    name = install(on_cuda, backend)
    q = normal(2, 4, 8)
    k = normal(5, 2, 8)
    none = cu([0, 0, 0])
    pooled = varlen_attention(q, k, k, cu([1, 0, 1]), cu([2, 0, 3]), 1, 3, causal=False, backend=name)
    expected, _ = dense_attention(q, k, k, [1, 0, 1], [2, 0, 3], left=-1, right=-1)
    torch.testing.assert_close(pooled.double(), expected, **TOLERANCE)
    out = varlen_attention(q, k[:0], k[:0], cu([1, 0, 1]), none, 1, 0, backend=name)
    assert not torch.autograd.grad(out.sum(), q)[0].any()


@pytest.mark.parametrize("backend", ["torch", "flash2", "flash3", "flash4", "efficient", "portable"])
@pytest.mark.parametrize("window", [None, 5])
def test_gathered_keys(on_cuda: pytest.MonkeyPatch, backend: str, window: int | None) -> None:
    """Sequences that share prefixes read keys by an index, whose rows' gradients add up."""
    name = backend if backend == "portable" else install(on_cuda, backend)
    on_cuda.setattr(entry, "choose", lambda _, request: choose(name, request))  # type: ignore[arg-type]
    queries = [4, 3, 5]
    seen_keys = [4, 6, 8]
    keys = torch.tensor([*range(4), *(0, 1, 2, 4, 5, 6), *(0, 1, 2, *range(7, 12))])
    torch.manual_seed(0)
    q, k, v = (normal(1, 4, 12, 16) for _ in range(3))
    spec = {"causal": True, "window": window, "scale": None, "softcap": None}
    call = KernelCall(cu(queries), cu(seen_keys), 5, 8, keys=keys)
    bound = entry.bind(*(x[0].transpose(0, 1) for x in (q, k, v)), call, **spec)
    out = bound.attend(q, k, v, None)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    left = -1 if window is None else window - 1
    gathered = (rows[0], rows[1][keys], rows[2][keys])
    expected, _ = dense_attention(*gathered, queries, seen_keys, left=left, right=0)

    torch.testing.assert_close(out[0].double(), expected, **TOLERANCE)
    grad = torch.randn(out.shape).bfloat16()
    got = torch.autograd.grad(out, (q, k, v), grad)
    wanted = torch.autograd.grad(expected, (q, k, v), grad[0].double())

    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=3e-2, atol=6e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs_and_expanded_gradients(on_cuda: pytest.MonkeyPatch, backend: str) -> None:
    name = install(on_cuda, backend)
    q, k, v = (torch.randn(2, 10, 16).bfloat16().transpose(0, 1).requires_grad_() for _ in range(3))
    out = varlen_attention(q, k, v, cu([4, 6]), cu([4, 6]), 6, 6, backend=name, sinks=None)
    plain = varlen_attention(*(x.contiguous() for x in (q, k, v)), cu([4, 6]), cu([4, 6]), 6, 6, backend=name)
    assert torch.equal(out, plain)
    if name == "flash":
        out.sum().backward()
        assert q.grad is not None
        assert q.grad.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"causal": False}])
@pytest.mark.parametrize("sinks", [False, True])
def test_torchs_own_operators_take_the_call(options: dict, sinks: bool) -> None:
    """Meta tensors run the operators' real schemas and shape rules; efficient's have none in backward."""
    q, k, v = (
        torch.empty(10, h, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2)
    )
    call = KernelCall(*(torch.empty(3, dtype=torch.int32, device="meta"),) * 2, 6, 6)
    sink = torch.empty(4, device="meta", requires_grad=True) if sinks else None
    spec = make_spec(16, **options)
    assert raw.attend(torch_cuda.AtenEfficient(), q, k, v, call, spec, sink).shape == (10, 4, 16)
    out = torch_cuda.attend(q, k, v, call, spec, sink)
    out.sum().backward()
    assert out.shape == (10, 4, 16)
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))


@pytest.mark.parametrize("flag", [False, True])
def test_deterministic_algorithms_reach_the_kernel(on_cuda: pytest.MonkeyPatch, flag: bool) -> None:
    standins.install(on_cuda, "flash2")
    module = sys.modules["flash_attn.flash_attn_interface"]
    real = standins.flash2_backward
    seen = []

    def spy(*args: object, **kwargs: object) -> Tensor:
        seen.append(inspect.signature(real).bind(*args, **kwargs).arguments["deterministic"])
        return real(*args, **kwargs)

    on_cuda.setattr(module, "_wrapped_flash_attn_varlen_backward", spy)
    on_cuda.setattr(torch, "are_deterministic_algorithms_enabled", lambda: flag)
    q, k, v = (normal(4, 2, 16) for _ in range(3))
    varlen_attention(q, k, v, cu([4]), cu([4]), 4, 4, backend="flash").sum().backward()
    assert seen == [flag]


@pytest.mark.parametrize("capability", [8, 9])
def test_prebuilt_flash_kernels_run_where_none_is_installed(
    on_cuda: pytest.MonkeyPatch, capability: int
) -> None:
    loaded = standins.install_prebuilt(on_cuda)
    spec = make_spec(16, softcap=2.0)
    sizes = {"dtype": torch.bfloat16, "head_size": 16, "value_size": 16}
    request = Request(device="cuda", spec=spec, capability=capability, **sizes)
    assert choose("auto", request) == ("flash3" if capability == 9 else "flash2")
    assert (
        loaded[0]
        == (("kernels-community/flash-attn3", 1), ("kernels-community/flash-attn2", 4))[capability == 8]
    )
    q, k, v = (normal(11, h, 16) for h in (4, 2, 2))
    out = varlen_attention(q, k, v, cu([4, 7]), cu([4, 7]), 7, 7, softcap=2.0, backend="flash")
    expected, _ = dense_attention(q, k, v, [4, 7], [4, 7], left=-1, right=0, softcap=2.0)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)


def test_a_prebuilt_kernel_that_does_not_load_says_so_in_one_line(on_cuda: pytest.MonkeyPatch) -> None:
    standins.install_prebuilt(on_cuda, OSError("no network\nsecond line"))
    q, k, v = (normal(4, 2, 16) for _ in range(3))
    message = r"the prebuilt kernels-community/flash-attn2 did not load \(OSError\)$"
    with pytest.raises(ValueError, match=f"(?m){message}"):
        varlen_attention(q, k, v, cu([4]), cu([4]), 4, 4, backend="flash")


def off_by(error: float, place: int) -> Callable[[Callable[..., Any]], Any]:
    """Return a change of a kernel: one of its results is too large."""

    def change(right: Callable[..., Any]) -> Any:
        @wraps(right)
        def wrong(*args: Any, **kwargs: Any) -> Any:
            results = list(right(*args, **kwargs))
            results[place] = results[place] + error
            return tuple(results)

        return wrong

    return change


def without_window(right: Callable[..., Any]) -> Any:
    @wraps(right)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **{**kwargs, "window_size_left": -1})

    return wrong


def failing(right: Callable[..., Any]) -> Any:
    @wraps(right)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel image is available for execution on the device")

    return wrong


def refusing(right: Callable[..., Any]) -> Any:
    @wraps(right)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("head size 16 is not supported")

    return wrong


HOPPER = Request(
    device="cuda",
    dtype=torch.bfloat16,
    head_size=16,
    value_size=16,
    spec=make_spec(16, window=4_096),
    capability=9,
)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (off_by(0.5, 0), "its output differs by"),
        (off_by(0.5, 1), "its output differs by"),  # the log-sum-exp, which sinks read
        (without_window, "its output differs by"),
        (off_by(torch.nan, 0), "its output differs by nan"),
        (failing, "it failed: RuntimeError: no kernel image is available"),
        (refusing, "it failed: ValueError: head size 16 is not supported"),
    ],
)
def test_a_kernel_that_is_wrong_in_its_trial_is_replaced_with_a_warning(
    on_cuda: pytest.MonkeyPatch, change: Callable[..., Any], found: str
) -> None:
    standins.install(on_cuda, "flash3")
    module = sys.modules["flash_attn_interface"]
    on_cuda.setattr(module, "_flash_attn_forward", standins.Operator(change(standins.flash3_forward)))
    with pytest.warns(THDWarning, match=f"(?s)flash-attn 3 here.*{found}"):
        assert choose("auto", HOPPER) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose("auto", HOPPER) == "torch"
        assert choose("auto", replace(HOPPER, sinks=True)) == "torch"  # the same trial


def test_a_wrong_gradient_is_found_too(on_cuda: pytest.MonkeyPatch) -> None:
    @wraps(standins.flash3_backward)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        results = standins.flash3_backward(*args, **kwargs)
        kwargs["dk"].mul_(2)
        return results

    standins.install(on_cuda, "flash3")
    module = sys.modules["flash_attn_interface"]
    on_cuda.setattr(module, "_flash_attn_backward", standins.Operator(wrong))
    with (
        pytest.warns(THDWarning, match="its dk differs by"),
        pytest.raises(ValueError, match=r"(?s)backend='flash' cannot run.*flash3.: gives wrong results here"),
    ):
        choose("flash", HOPPER)


def test_a_kernel_waits_for_its_trial_where_operators_are_watched(on_cuda: pytest.MonkeyPatch) -> None:
    standins.install(on_cuda, "flash3")
    state = torch.get_rng_state()
    with FlopCounterMode(display=False) as counter:
        assert choose("auto", HOPPER) == "torch"
    assert counter.get_total_flops() == 0
    assert choose("auto", HOPPER) == "flash3"
    assert torch.equal(torch.get_rng_state(), state)
    with FlopCounterMode(display=False):
        assert choose("auto", HOPPER) == "flash3"  # known by now
        assert choose("flash", replace(HOPPER, head_size=32, value_size=32)) == "flash3"  # the user's choice


def test_a_trial_adds_no_flops_and_ignores_the_default_device(on_cuda: pytest.MonkeyPatch) -> None:
    standins.install(on_cuda, "flash3")
    counter = StepCounter()
    counter.start()
    try:
        with torch.device("meta"):
            assert choose("auto", HOPPER) == "flash3"
    finally:
        counter.stop()
    assert not counter.products
    assert not counter.calls


def test_a_trial_inside_a_checkpointed_layer_saves_nothing_there(on_cuda: pytest.MonkeyPatch) -> None:
    standins.install(on_cuda, "flash3")
    offsets = cu([5, 3])
    chosen = list[str]()

    def layer(x: Tensor) -> Tensor:
        chosen.append(choose("auto", HOPPER))
        return varlen_attention(x, x, x, offsets, max_seqlen_q=5, backend="flash")

    gradients = []
    for run in (partial(checkpoint, layer, use_reentrant=False), layer):
        x = torch.ones(8, 2, 16, dtype=torch.bfloat16, requires_grad=True)
        run(x).sum().backward()
        gradients.append(x.grad)
    assert chosen == ["flash3"] * 3
    assert torch.equal(*gradients)
