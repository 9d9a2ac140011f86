import numpy as np
import pytest

from benchmarks.balance import LLAMA_8B
from lightning_thd.flops import FlopsModel, SeqStats
from lightning_thd.packing import Cost


def test_is_the_models_own_work() -> None:
    model = FlopsModel.from_config(LLAMA_8B)
    cost = Cost.from_flops(model)
    for length in (1, 7, 100, 8192, 40_000):
        flops = model.training_flops(SeqStats.from_lengths([length])).hardware
        assert cost([length])[0] == pytest.approx(flops, rel=1e-6)
    # 6 FLOPs for each of the 7.5e9 weights that multiply, 3 * 2 * 2 * 4096 / 2 a pair of tokens and layer.
    assert cost.linear == pytest.approx(6 * 7.5e9, rel=0.01)
    assert cost.quadratic == pytest.approx(6 * 4096 * 32)


def test_a_window_makes_long_sequences_cheaper() -> None:
    mistral = FlopsModel.from_config(LLAMA_8B | {"model_type": "mistral", "sliding_window": 1024})
    cost = Cost.from_flops(mistral, longest=8192)
    assert 0 < cost.quadratic < Cost.from_flops(FlopsModel.from_config(LLAMA_8B)).quadratic / 20
    for length, within in ((8192, 1e-6), (4096, 1e-6), (1024, 0.02), (16_384, 0.02)):
        stats = SeqStats.from_lengths([length], windows=mistral.windows)
        assert cost([length])[0] == pytest.approx(mistral.training_flops(stats).hardware, rel=within)


@pytest.mark.parametrize("values", [(-1, 1), (1, -1), (0, 0), (np.nan, 1)])
def test_refuses_what_is_no_work(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"not both 0. Cost\(linear=1, quadratic=0\) balances tokens"):
        Cost(linear=values[0], quadratic=values[1])
