"""The workers' KV caches, as their own events describe them."""
