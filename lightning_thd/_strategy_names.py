"""The names of ``Trainer(strategy=...)`` -> entries of Lightning's registry; classes are imported at use."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

# Each strategy's name and class, and the line that Lightning shows of it.
STRATEGIES = {
    "thd": ("THDSingleDeviceStrategy", "Packed steps on one device"),
    "thd_ddp": ("THDDDPStrategy", "Packed steps with replicated parameters"),
    "thd_model_parallel": ("THDModelParallelStrategy", "Packed steps with sharded or cut parameters"),
}


def register_strategy_names() -> None:
    """Register the names with Lightning; more calls do no harm. ``import lightning_thd`` calls it."""
    for name, (class_name, description) in STRATEGIES.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, _Maker(class_name), description=description)


class _Maker:
    """Makes a strategy by the name of its class, which is imported then."""

    def __init__(self, class_name: str) -> None:
        self.class_name = class_name

    def __call__(self, **options: Any) -> Any:
        from lightning_thd import strategies

        return getattr(strategies, self.class_name)(**options)
