"""``python -m lightning_thd``: the command ``lightning-thd``, where its script is not on the path."""

from lightning_thd.cli import main

if __name__ == "__main__":
    main()
