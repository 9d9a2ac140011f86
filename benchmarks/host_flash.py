"""Host time of a training step over transformers' own flash-attention path, on the imagined GPU.

``python -m benchmarks.host_flash`` is ``benchmarks.host_time --imagined``, with a place in RESULTS.md.
"""

from __future__ import annotations

from benchmarks import host_time


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    host_time.main(["--imagined", *(argv or ())])


if __name__ == "__main__":
    main()
