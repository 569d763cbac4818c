"""vLLM's JSON, and how it becomes the common form. No other place knows it."""
