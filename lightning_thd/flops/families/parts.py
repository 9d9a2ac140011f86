"""Sizes -> terms of one part of a layer: attention, MLP, experts, state space, linear attention."""

from __future__ import annotations

from dataclasses import replace

from lightning_thd.flops.terms import Basis, Kind, Term, matmul, recurrence, scores
from lightning_thd.stats import Window


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: Window | None = None,
    gate: bool = False,
    input_size: int | None = None,
    both_ways: bool = False,
) -> list[Term]:
    """Return the terms of grouped-query attention: q, k, v and output projections, and scores."""
    width = hidden if input_size is None else input_size
    inner = heads * head_dim
    return [
        matmul("qkv", width * (inner * (2 if gate else 1) + 2 * kv_heads * head_dim)),
        scores(heads, head_dim, head_dim, window=window, basis="all_pair" if both_ways else "pair"),
        matmul("out", inner * hidden),
    ]


def latent_attention(
    hidden: int,
    heads: int,
    *,
    q_rank: int | None,
    kv_rank: int,
    nope: int,
    rope: int,
    v_dim: int,
    top_k: int | None = None,
) -> list[Term]:
    """Return the terms of multi-head latent attention (DeepSeek), with low-rank q, k and v."""
    qk_dim = nope + rope
    query = hidden * heads * qk_dim if not q_rank else q_rank * (hidden + heads * qk_dim)
    return [
        matmul("q", query),
        matmul("kv", hidden * (kv_rank + rope) + kv_rank * heads * (nope + v_dim)),
        scores(heads, qk_dim, v_dim, window=top_k),
        matmul("out", heads * v_dim * hidden),
    ]


def indexer(
    hidden: int, q_rank: int, *, heads: int, head_dim: int, keys: int = 1, window: Window | None = None
) -> list[Term]:
    """Return the terms of DeepSeek's lightning indexer, which scores every pair to pick the best keys.

    It has no backward pass. ``keys`` is the number of projections from which the indexer makes its keys.
    """
    terms = [
        matmul("indexer", q_rank * heads * head_dim + hidden * (keys * head_dim + heads)),
        # the weighted sum over heads counts like values of size 1
        scores(heads, head_dim, 1, window=window, name="indexer_scores"),
    ]
    return [replace(term, input_grad=0, weight_grad=0) for term in terms]


def cross_attention(
    hidden: int, heads: int, kv_heads: int, head_dim: int, *, kv_hidden: int | None = None
) -> list[Term]:
    """Return the terms of attention without a mask to another sequence, such as the patches of an image."""
    source = hidden if kv_hidden is None else kv_hidden
    return [
        matmul("cross_q", hidden * heads * head_dim),
        matmul("cross_kv", 2 * source * kv_heads * head_dim, basis="cross_token"),
        scores(heads, head_dim, head_dim, basis="cross_pair", name="cross_attention"),
        matmul("cross_out", heads * head_dim * hidden),
    ]


def mlp(
    hidden: int,
    inner: int,
    *,
    gated: bool = True,
    name: str = "mlp",
    kind: Kind = "linear",
    basis: Basis = "token",
    last: bool = True,
) -> list[Term]:
    """Return an MLP's terms; gated with ``hidden`` 2 and ``inner`` 3, its forward is 2 x 18 FLOPs a token."""
    return [
        matmul(f"{name}_up", hidden * inner * (2 if gated else 1), kind=kind, basis=basis),
        matmul(f"{name}_down", hidden * inner, kind=kind, basis=basis, last=last),
    ]


def experts(
    hidden: int,
    inner: int,
    *,
    num_experts: int,
    top_k: int,
    gated: bool = True,
    shared: int = 0,
    shared_gate: bool = False,
    latent: int | None = None,
    shared_last: bool = True,
) -> list[Term]:
    """Return the terms of a mixture of experts: router, ``top_k`` routed experts, and shared ones."""
    width = latent or hidden
    terms = [matmul("router", hidden * num_experts, kind="router")]
    if latent:
        terms.append(matmul("latent_in", hidden * latent))
    # The router's weights multiply the experts' outputs, so the backward needs these: no product is last.
    terms += mlp(width, inner * top_k, gated=gated, name="experts", last=False)
    if latent:
        terms.append(matmul("latent_out", latent * hidden, last=not shared))
    if shared:
        terms += mlp(hidden, shared, gated=gated, name="shared", last=shared_last and not shared_gate)
    if shared_gate:
        terms.append(matmul("shared_gate", hidden, kind="router"))
    return terms


def _scanned(hidden: int, inner: int, projected: int, *between: Term) -> list[Term]:
    """Return a mixer's terms: in-projection (``projected`` multiply-adds), ``between``, out-projection."""
    return [matmul("in", projected), *between, matmul("out", inner * hidden)]


def _delta_rule(hidden: int, value: int, projected: int, conv: int, delta: int) -> list[Term]:
    """Return the terms of a delta rule, of which ``conv`` and ``delta`` are FLOPs a token."""
    return _scanned(hidden, value, projected, recurrence("conv", conv), recurrence("delta", delta))


def mamba1(hidden: int, inner: int, *, state: int, dt_rank: int) -> list[Term]:
    """Return Mamba's terms: its projections, and 9 FLOPs per state for the scan (VMamba)."""
    x_dt = matmul("x_dt", inner * (dt_rank + 2 * state) + dt_rank * inner)
    return _scanned(hidden, inner, hidden * 2 * inner, x_dt, recurrence("scan", 9 * inner * state))


def mamba2(hidden: int, heads: int, head_dim: int, *, groups: int, state: int) -> list[Term]:
    """Return Mamba 2's terms as Megatron-LM counts them: 7 FLOPs per state, no convolution."""
    inner = heads * head_dim
    projected = hidden * (2 * inner + 2 * groups * state + heads)
    return _scanned(hidden, inner, projected, recurrence("scan", 7 * inner * state))


def gated_delta(
    hidden: int, *, qk_heads: int, qk_dim: int, v_heads: int, v_dim: int, kernel: int
) -> list[Term]:
    """Return the terms of a gated delta net as Megatron-LM counts it, convolution included."""
    qk = qk_heads * qk_dim
    value = v_heads * v_dim
    conv = 2 * kernel * (2 * qk + value)
    delta = 8 * v_heads * qk_dim * v_dim
    return _delta_rule(hidden, value, hidden * (2 * qk + 2 * value + 2 * v_heads), conv, delta)


def kimi_delta(hidden: int, *, heads: int, head_dim: int, kernel: int) -> list[Term]:
    """Return the terms of Kimi delta attention: a gated delta net with a decay of rank ``head_dim``."""
    inner = heads * head_dim
    gates = 2 * (hidden * head_dim + head_dim * inner)
    projected = 3 * hidden * inner + gates + hidden * heads
    return _delta_rule(hidden, inner, projected, 2 * kernel * 3 * inner, 8 * heads * head_dim * head_dim)


def short_conv(hidden: int, *, kernel: int) -> list[Term]:
    """Return the terms of LFM2's gated short convolution: projections in and out, ``kernel`` taps."""
    return _scanned(hidden, hidden, 3 * hidden * hidden, recurrence("conv", 2 * kernel * hidden))
