"""Prefix trees: which worker was sent which prompts."""
