"""The portable kernel, run for real on a CPU, as the backend of every family of the support table."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_thd.attention import entry, support
from lightning_thd.models import register_thd
from tests.models import matrix
from tests.models.families import FAMILIES

register_thd()
# Windows with softcap, sinks, latent attention and a hybrid; the others are marked slow.
SAMPLE = {"gemma2", "gpt_oss", "deepseek_v3", "lfm2"}
WITHOUT_ATTENTION = {"mamba", "falcon_mamba", "mamba2", "xlstm"}


@pytest.mark.parametrize(
    "name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
)
def test_every_family_on_the_portable_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    run = entry.run

    def noting(kernel: support.Kernel, *rest: Any) -> Any:
        ran.append(kernel)
        return run(kernel, *rest)

    monkeypatch.setattr(support, "_USUAL", ("portable",))
    monkeypatch.setattr(entry, "known_choice", lambda request: support.choose("auto", request))
    monkeypatch.setattr(entry, "run", noting)
    model = matrix.thd_model(name).eval()
    matrix.assert_same(matrix.run_packed(model), matrix.oracle(name)[1], tolerance=1e-5)
    assert set(ran) == (set() if name in WITHOUT_ATTENTION else {"portable"})
