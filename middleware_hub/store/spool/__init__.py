"""Batches that wait for a store that cannot be written, in a file that outlives its router."""
