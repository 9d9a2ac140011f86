"""``python -m lightning_thd``: runs the command ``lightning-thd`` if its script is not on the PATH."""

from lightning_thd.cli import main

if __name__ == "__main__":
    main()
