"""The workers: what one is, and the pool of them."""
