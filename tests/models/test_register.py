"""The name "thd" is known to transformers however and whenever transformers is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")


from lightning_thd.models import register_thd
from lightning_thd.models.register import after_import
from tests.scripts import run_python

register_thd()


def test_registering_after_transformers_was_imported() -> None:
    out = run_python(
        "-c",
        "import sys, transformers.modeling_utils as m\n"
        "for x in [x for x in sys.modules if x.partition('.')[0] == 'lightning_thd']: del sys.modules[x]\n"
        "table = m.AttentionInterface._global_mapping\ntable.pop('thd', None)\n"
        "import lightning_thd.models as t\nt.register_thd()\nt.register_thd()\nprint('thd' in table)",
    )
    assert out.split() == ["True"]


def test_after_import_runs_once_for_a_later_import(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thd_late_module.py").write_text("value = 3\n")  # type: ignore[operator]
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    after_import("thd_late_module", lambda module: seen.append(module.value))
    assert seen == []
    import thd_late_module  # noqa: F401

    assert seen == [3]
    after_import("thd_late_module", lambda module: seen.append(-module.value))
    assert seen == [3, -3]


STAND_IN = """
class AttentionInterface:
    table = {}
    @classmethod
    def register(cls, name, function): cls.table[name] = function
class AttentionMaskInterface(AttentionInterface):
    table = {}
def _preprocess_mask_arguments(%s): ...
class PreTrainedModel:
    def get_correct_attn_implementation(self): ...
    def _set_gradient_checkpointing(self, enable, gradient_checkpointing_func): ...
"""
KNOWN = "config, inputs_embeds, attention_mask, past_key_values, position_ids"


@pytest.mark.parametrize(
    ("release", "arguments", "table", "message"),
    [
        ("5.14.1", KNOWN, "AttentionInterface", "5.14.1: it hands no boundaries to state-space layers"),
        ("5.99.0", "config", "AttentionMaskInterface", "5.99.0: it has changed underneath"),
    ],
)
def test_another_transformers_refuses_thd_alone(
    tmp_path: Path, release: str, arguments: str, table: str, message: str
) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in ("modeling_utils", "masking_utils"):
        (package / f"{name}.py").write_text(STAND_IN % arguments)
    info = tmp_path / f"transformers-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {release}\n")
    out = run_python(
        "-c",
        "import sys, lightning_thd\n"
        "for x in [x for x in sys.modules if x.partition('.')[0] == 'transformers']: del sys.modules[x]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        # Some release of what lightning needs may have imported transformers, and the hooks are done.
        "from lightning_thd.models import register\nregister._done.clear()\nregister.register_thd()\n"
        "import transformers.modeling_utils as m, transformers.masking_utils as k\n"
        f"table = (m if {table!r} == 'AttentionInterface' else k).{table}.table\n"
        "try: table['thd']()\nexcept ValueError as error: print(error)",
    )
    assert message in out
    assert "Install a release from 5.15 to 5.23" in out
