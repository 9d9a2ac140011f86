"""FP8 for packs: conversion of a model, a Trainer's plugin and a report; a device's fastest precision."""

from typing import TYPE_CHECKING

from lightning_thd._lazy import lazy_face

if TYPE_CHECKING:
    from lightning_thd.precision.convert import Converted, convert_linear, fp8_context
    from lightning_thd.precision.plugin import FP8Precision
    from lightning_thd.precision.recipes import fastest_precision
    from lightning_thd.precision.report import fp8_report

__all__ = [
    "Converted",
    "FP8Precision",
    "convert_linear",
    "fastest_precision",
    "fp8_context",
    "fp8_report",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "Converted": "lightning_thd.precision.convert",
            "convert_linear": "lightning_thd.precision.convert",
            "fp8_context": "lightning_thd.precision.convert",
            "FP8Precision": "lightning_thd.precision.plugin",
            "fastest_precision": "lightning_thd.precision.recipes",
            "fp8_report": "lightning_thd.precision.report",
        },
    )
