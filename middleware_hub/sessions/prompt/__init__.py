"""The prompt of a turn: append to the sampled chain, splice it into a rendering, or encode text."""
