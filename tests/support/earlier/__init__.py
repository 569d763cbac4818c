"""Stores that routers of earlier commits wrote, and what their workers had sampled: see `make`."""
