"""On a GPU: every backend installed against fp64 on the CPU, forward and backward, as in the benchmark."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_attention import CASES, SIZES, TOLERANCE, worst_error
from lightning_thd.attention import SUPPORT, varlen_attention
from lightning_thd.attention.support import missing
from tests.device_reads import ON_GPU, no_waiting

pytestmark = ON_GPU
KERNELS = [kernel for kernel, row in SUPPORT.items() if row.device != "cpu"]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_equals_fp64(kernel: str, case: str, sizes: str) -> None:
    absent = missing(kernel)
    if absent is not None:
        pytest.skip(absent)
    error = worst_error(kernel, case, SIZES[sizes])
    if error is None:
        pytest.skip(f"{kernel} does not support {case} at head size {sizes}: the table says so")
    assert error <= TOLERANCE


def test_no_wait_for_the_device() -> None:
    x = torch.randn(4, 2, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32, device="cuda")
    varlen_attention(x, x, x, cu_seqlens, cu_seqlens, 4, 4).sum().backward()  # loads kernels
    with no_waiting():
        varlen_attention(x, x, x, cu_seqlens, cu_seqlens, 4, 4).square().sum().backward()
