"""vLLM's routes, in front of the same engine."""
