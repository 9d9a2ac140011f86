"""Speed and memory, us and the peers in one run: ``python -m benchmarks.<name>``."""
