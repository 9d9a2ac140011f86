"""FP8 for packs: conversion of a model, a Trainer's plugin and a report; a device's fastest precision."""

from lightning_thd.precision.convert import Converted, convert_linear, fp8_context
from lightning_thd.precision.plugin import FP8Precision
from lightning_thd.precision.recipes import fastest_precision
from lightning_thd.precision.report import fp8_report

__all__ = ["Converted", "FP8Precision", "convert_linear", "fastest_precision", "fp8_context", "fp8_report"]
