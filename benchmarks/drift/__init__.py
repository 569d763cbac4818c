"""How much of what a trained model samples is lost if its text is encoded again: `python -m benchmarks.drift.run`."""
