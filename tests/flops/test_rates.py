from __future__ import annotations

from lightning_thd.flops import FlopsModel, SeqStats, throughput
from lightning_thd.flops.model import from_ints, num_ints, to_ints
from lightning_thd.flops.terms import Layer, matmul, scores
from lightning_thd.stats import Chunk

TERMS = (matmul("w", 50), scores(1, 5, 5))
MODEL = FlopsModel(name="one", layers=(Layer(path="layers.0", terms=TERMS),))
STATS = SeqStats.from_lengths([60, 40], slots=125)


def test_every_key_and_value_on_one_device() -> None:
    linear, attention = 6 * 50 * 100, 3 * 20 * (60**2 + 40**2) // 2
    flops = linear + attention
    assert throughput(STATS, seconds=2.0, model=MODEL, microbatches=1, peak=1e6, recompute="full") == {
        "device/items_per_sec": 62.5,
        "device/real_items_per_sec": 50.0,
        "device/samples_per_sec": 1.0,
        "device/batches_per_sec": 0.5,
        "device/flops_per_sec": flops / 2,
        "device/tflops_per_gpu": flops / 2 / 1e12,
        "device/mfu": flops / 2 / 1e6,
        "device/hfu": flops * 4 / 3 / 2 / 1e6,
        "packing/fill": 0.8,
        "packing/attention_fraction": attention / flops,
    }


def test_several_devices_share_the_work_and_add_the_sums() -> None:
    one = throughput(STATS, seconds=2.0, model=MODEL, peak=1e6)
    four = throughput(STATS, seconds=2.0, model=MODEL, peak=1e6, devices=4)
    assert four["device/mfu"] == one["device/mfu"] / 4
    assert four["flops_per_sec"] == one["device/flops_per_sec"] == 4 * four["device/flops_per_sec"]
    assert four["real_items_per_sec"] == 50.0
    rates = throughput(STATS, seconds=1.0)
    assert not any("flops" in key or "mfu" in key or "attention" in key for key in rates)
    assert "device/mfu" not in throughput(STATS, seconds=1.0, model=MODEL)


def test_counts_survive_the_trip_through_integers() -> None:
    terms = (scores(1, 5, 5, window=7), scores(1, 5, 5, window=Chunk(4)))
    model = FlopsModel(name="w", layers=(Layer(path="", terms=terms),))
    stats = SeqStats.from_lengths([3, 30], windows=model.windows, slots=64)
    assert from_ints(to_ints(stats, model), model) == stats
    assert len(to_ints(SeqStats(), model)) == num_ints(model) == num_ints(None) + 2
