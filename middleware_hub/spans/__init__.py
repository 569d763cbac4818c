"""Chains of token spans, their flat form for a trainer, and the order of their weight versions."""
