"""The radix tree over texts: its structure, recording, matching and eviction."""
