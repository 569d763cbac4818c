"""Many long rollouts at once: `python -m benchmarks.scale`."""
