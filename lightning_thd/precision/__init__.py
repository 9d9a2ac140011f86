"""A bf16 model -> the same weights multiplied in FP8, and packs of the lengths that FP8 kernels take."""

from lightning_thd.precision.convert import Converted, convert_linear, fp8_context
from lightning_thd.precision.plugin import FP8Precision
from lightning_thd.precision.report import fp8_report

__all__ = ["Converted", "FP8Precision", "convert_linear", "fp8_context", "fp8_report"]
