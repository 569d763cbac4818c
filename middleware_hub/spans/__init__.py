"""Chains of token spans, hidden tails, the flat form of a chain for a trainer, and the order of weight versions."""
