"""The command ``lightning-thd``: training through LightningCLI, and tools that need no Trainer."""

from lightning_thd.cli.main import main

__all__ = ["main"]
