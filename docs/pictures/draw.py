"""Draw the pictures of the documentation: python docs/pictures/draw.py."""

from pathlib import Path

import numpy as np

from lightning_thd.packing import PackPlanner, Sequences, pack_lengths
from lightning_thd.report.packs import draw_packs, draw_work

HERE = Path(__file__).parent


def main() -> None:
    rng = np.random.default_rng(0)
    # The chat distribution of the benchmarks: lognormal, mean 600, 16 to 4,096 tokens.
    lengths = np.clip(
        rng.lognormal(np.log(600) - 0.5, 1.0, 4_096).astype(np.int64), 16, 4_096
    )
    packing = pack_lengths(lengths[:140], 8_192)
    packs = [
        lengths[pack].tolist()
        for pack in np.split(packing.indices, packing.offsets[1:-1])
    ]
    for pack in packs:
        rng.shuffle(pack)
    planner = PackPlanner(lengths, 8_192, global_batch=Sequences(512))
    planned = [
        sum(work(lengths[pack]) for pack in rank)
        for rank in planner.step(0, 0, 8).indices_by_rank()
    ]
    naive = [work(part) for part in np.array_split(lengths[:512], 8)]
    for theme in ("light", "dark"):
        figure = draw_packs(packs[:10], 8_192, theme=theme, width=6.4)
        figure.savefig(HERE / f"packs-{theme}.png", dpi=150)
        draw_work(naive, planned, theme=theme).savefig(
            HERE / f"work-{theme}.png", dpi=110
        )


def work(lengths: np.ndarray) -> float:
    """Count a small dense model's linear parts and squares."""
    return float((lengths * (4_096 + lengths)).sum())


if __name__ == "__main__":
    main()
