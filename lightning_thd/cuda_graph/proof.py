"""A captured step and a small batch -> an error where its replay gives other numbers than the step itself.

A replay works on a bucket's shapes, a batch on its own. A step that divides by the number of slots or of
sequences, takes a mean over slots, or returns a tensor of them gives other numbers in a bucket.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightning_thd.cuda_graph.buckets import Bucket, Layout
from lightning_thd.cuda_graph.capture import CapturedStep, Example, Subject
from lightning_thd.cuda_graph.errors import CaptureError
from lightning_thd.cuda_graph.fingerprint import PLAIN
from lightning_thd.cuda_graph.guards import LoggedValue, guarded
from lightning_thd.cuda_graph.module_state import RandomUse, restored

_ADVICE = (
    "Divide by what the batch counts, (batch.targets != -100).sum(), or use causal_lm_loss; return and log "
    "sums over tokens, no tensors of slots; or train this step eagerly."
)
# Relative differences by dtype that are rounding: the batch is padded, which orders sums in another way.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}
_LOW, _FP8, _RANDOM = 2e-2, 0.1, 0.7


def prove(subject: Subject, step: CapturedStep, example: Example) -> None:
    """Refuse a captured step whose numbers differ from the step's on a batch in a nearly empty bucket."""
    layout = small_layout(step.inputs.bucket, 1 if step.inputs.cut is None else step.inputs.cut.multiple)
    if layout is None:
        return
    batch = step.inputs.dummy(layout)
    batch = batch.replace(input_ids=torch.ones_like(batch.input_ids))  # the bucket's tail holds zeros
    use = RandomUse()
    with restored(subject.module), guarded(subject.module) as said, use:
        wanted = subject(batch, *example.rest)
    with restored(subject.module), guarded(subject.module) as replayed:
        found = step.run(batch)
    bound = _RANDOM if use.draws else _rounding(subject.module, example.device)
    _compare(found, wanted, "the step returns", bound)
    logged = step.logged or replayed
    if [x.name for x in logged] != [x.name for x in said]:
        raise CaptureError(
            f"the step logs {[x.name for x in logged]} in a graph and {[x.name for x in said]} without. Log "
            "the same keys for every batch."
        )
    for ours, theirs in zip(logged, said, strict=True):
        _compare(ours.value, theirs.value, f"the step logs {ours.name!r}", bound)
        _refuse_other_options(ours, theirs)


def small_layout(bucket: Bucket, multiple: int) -> Layout | None:
    """Return one or two sequences that take at most a quarter of a bucket; None if none fits."""
    unit = math.lcm(multiple, math.gcd(bucket.slots, 128))
    unit = unit if unit <= min(bucket.max_seqlen // 2, bucket.slots // 4) else multiple
    longest = min(bucket.max_seqlen // 2, bucket.slots // 4) // unit * unit
    most = bucket.max_seqlen // unit * unit
    for count, length in ((2, longest), (1, longest), (2, most), (1, most)):
        layout = Layout(count * length, count, length)
        if length and layout.slots < bucket.slots and bucket.misfit(layout) is None:
            return layout
    return None


def _compare(found: Any, wanted: Any, what: str, bound: float) -> None:
    pairs = zip(tree_flatten_with_path(found)[0], tree_flatten_with_path(wanted)[0], strict=True)
    for (path, ours), (_, theirs) in pairs:
        name = f"{what} {keystr(path).strip('[]')}".rstrip()
        if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
            continue
        if ours.shape != theirs.shape:
            raise CaptureError(
                f"{name}: a tensor of shape {tuple(theirs.shape)}, and {tuple(ours.shape)} from a graph, "
                f"which is padded. {_ADVICE}"
            )
        error = _error(ours.detach().double(), theirs.detach().double())
        if error > bound:
            raise CaptureError(
                f"{name}: a value that differs by {error:.1e} from a graph, which is padded with dummy "
                f"sequences. It depends on the number of slots or sequences, or on the padding. {_ADVICE}"
            )


def _error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative difference; 0 if there are no finite numbers."""
    error = float((found - wanted).norm() / wanted.norm().clamp_min(1e-30)) if wanted.numel() else 0.0
    return error if math.isfinite(error) else 0.0


def _refuse_other_options(ours: LoggedValue, theirs: LoggedValue) -> None:
    for name, value in theirs.kwargs.items():
        kept = ours.kwargs.get(name)
        if isinstance(value, PLAIN) and kept != value:
            raise CaptureError(
                f"the step logs {ours.name!r} with {name}={value!r}, which depends on the batch; a replay "
                f"would log it with {name}={kept!r} always. Log it in on_train_batch_end."
            )


def _rounding(module: nn.Module, device: torch.device) -> float:
    if any("_thd_fp8" in vars(child) for child in module.modules()):
        return _FP8  # scales of whole tensors see the padding
    dtypes = {x.dtype for x in module.parameters()}
    coarse = torch.is_autocast_enabled(device.type) or torch.get_float32_matmul_precision() != "highest"
    if coarse and torch.float64 not in dtypes:
        return _LOW
    return max((_ROUNDING.get(dtype, _LOW) for dtype in dtypes), default=_LOW)
