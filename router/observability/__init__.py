"""Metrics, traces, logs, and the list of requests in flight."""
