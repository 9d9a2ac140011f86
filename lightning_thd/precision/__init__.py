"""A device -> its fastest precision; a bf16 model -> the same weights in FP8, and packs that fit."""

from lightning_thd.precision.convert import Converted, convert_linear, fp8_context
from lightning_thd.precision.plugin import FP8Precision
from lightning_thd.precision.recipes import fastest_precision
from lightning_thd.precision.report import fp8_report

__all__ = ["Converted", "FP8Precision", "convert_linear", "fastest_precision", "fp8_context", "fp8_report"]
