"""The parts of `python -m benchmarks.soak`."""
