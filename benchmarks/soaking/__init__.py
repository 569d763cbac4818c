"""A long run of a router under load and trouble: `python -m benchmarks.soaking.soak`."""
