"""Chains of token spans, hidden tails, flattened chains for trainers, and the order of weight versions."""
