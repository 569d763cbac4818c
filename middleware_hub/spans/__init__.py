"""Chains of token spans, and the order of their weight versions."""
