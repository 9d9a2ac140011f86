"""What ``import lightning_thd`` needs and brings along."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import lightning_thd

OPTIONAL = ("transformers", "datasets", "accelerate", "wandb", "matplotlib", "jsonargparse", "pyarrow")
WORKS = """
import torch
import lightning_thd
cu = torch.tensor([0, 2, 5], dtype=torch.int32)
q = torch.randn(5, 2, 8)
print(tuple(lightning_thd.varlen_attention(q, q, q, cu, cu, 3, 3).shape))
data = lightning_thd.THDDataModule([{"input_ids": [1, 2, 3]}] * 9, capacity=8)
data.setup("fit")
print(len(list(data.train_dataloader())))
"""
BRINGS = """
import sys
import lightning.pytorch
before = set(sys.modules)
import lightning_thd
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
print("transformers.modeling_utils" in sys.modules)
"""


def run(code: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_works_where_no_optional_package_is_installed(tmp_path: Path) -> None:
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(OPTIONAL):
            (tmp_path / entry.name).symlink_to(entry)
    root = Path(__file__).parent.parent
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]\n{WORKS}"
    assert run(code, "-I", "-S").splitlines() == ["(5, 2, 8)", "5"]


def test_it_brings_no_optional_package_and_no_model_code_along() -> None:
    brought, *known = run(BRINGS).splitlines()
    assert not set(brought.split()) & set(OPTIONAL)
    assert known == ["False"]


def test_every_public_name_is_there() -> None:
    assert len(lightning_thd.__all__) <= 14
    assert all(hasattr(lightning_thd, name) for name in lightning_thd.__all__)
