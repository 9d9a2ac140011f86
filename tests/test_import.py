"""What ``import lightning_thd`` needs and brings along."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import lightning_thd

OPTIONAL = ("transformers", "datasets", "accelerate", "wandb", "matplotlib", "jsonargparse", "pyarrow")
CODE = """
import sys
import torch
import lightning.pytorch

class Asked:
    names = set()

    def find_spec(self, name, path=None, target=None):
        self.names.add(name)

sys.meta_path.insert(0, Asked())
import lightning_thd
print(*Asked.names)
cu = torch.tensor([0, 2, 5], dtype=torch.int32)
q = torch.randn(5, 2, 8)
print(tuple(lightning_thd.varlen_attention(q, q, q, cu, cu, 3, 3).shape))
data = lightning_thd.THDDataModule([{"input_ids": [1, 2, 3]}] * 9, capacity=8)
data.setup("fit")
print(len(list(data.train_dataloader())))
"""


def test_it_works_where_no_optional_package_is_installed_and_asks_for_none(tmp_path: Path) -> None:
    """Where they are installed it brings none along, because the import does not even look for one."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(OPTIONAL):
            (tmp_path / entry.name).symlink_to(entry)
    root = Path(__file__).parent.parent
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]\n{CODE}"
    script = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported, *works = done.stdout.splitlines()
    assert "lightning_thd" in imported.split()
    assert not {name.partition(".")[0] for name in imported.split()} & set(OPTIONAL)
    assert works == ["(5, 2, 8)", "5"]


def test_every_public_name_is_there() -> None:
    assert len(lightning_thd.__all__) <= 14
    assert all(hasattr(lightning_thd, name) for name in lightning_thd.__all__)
