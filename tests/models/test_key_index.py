"""Attention that keeps a number of keys a query: plain where a sequence has no more, refused where it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from packaging.version import Version

from benchmarks import families
from lightning_thd.batch import THDBatch
from lightning_thd.models import register_thd
from tests.models.matrix import relative_error

register_thd()
NAMES = [
    ("deepseek_v32", "DeepseekV32ForCausalLM"),
    ("glm_moe_dsa", "GlmMoeDsaForCausalLM"),
    pytest.param("axk2", "AXK2ForCausalLM", marks=pytest.mark.slow),
    pytest.param("hy_v4", "HYV4ForCausalLM", marks=pytest.mark.slow),
]


def limited(family: str, name: str, attention: str, topk: int) -> Any:
    model = families.build(family, name, attention)
    model.config.index_topk = topk
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = topk
    return model


def pack(*lengths: int) -> THDBatch:
    generator = torch.Generator().manual_seed(0)
    return THDBatch.collate(
        [{"input_ids": torch.randint(8, 120, (n,), generator=generator)} for n in lengths]
    )


@pytest.mark.parametrize(("family", "name"), NAMES)
def test_sequences_of_at_most_the_kept_keys_are_exact_and_longer_ones_refused(family: str, name: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    stock, model = (limited(family, name, attention, 9) for attention in ("eager", "thd"))
    model.load_state_dict(stock.state_dict())
    batch = pack(9, 1, 4, 9, 8)
    got = batch.unpack(model(**batch.hf_kwargs()).logits)
    for ours, ids in zip(got, batch.unpack(batch.input_ids), strict=True):
        assert relative_error(ours, stock(input_ids=ids[None], use_cache=False).logits[0]) <= 2e-5
        assert relative_error(ours, model(input_ids=ids[None], use_cache=False).logits[0]) <= 2e-5
    longer = pack(9, 10)
    message = r"chooses the keys of every token by an index.*Use sequences of at most 9 tokens"
    if Version(transformers.__version__) < Version("5.23"):  # which asks for no mask to index
        message = "passes indices to its attention"
    for call in (longer.hf_kwargs(), {"input_ids": longer.input_ids[None]}):
        with pytest.raises(ValueError, match=message):
            model(**call)


def test_the_limit_matters() -> None:
    """Else the test above would show nothing."""
    few, all_keys = (limited(*NAMES[0], "eager", topk) for topk in (4, 64))  # type: ignore[misc]
    ids = pack(12).input_ids[None]
    logits = [model(input_ids=ids, use_cache=False).logits for model in (few, all_keys)]
    assert relative_error(logits[0], logits[1]) > 1e-3
