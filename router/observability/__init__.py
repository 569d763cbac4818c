"""Metrics, traces, logs, and the requests in flight."""
