"""The command ``lightning-thd``."""

from lightning_thd.cli.main import main

__all__ = ["main"]
