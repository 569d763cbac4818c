"""Chat templates: how they render messages, and what they write around a turn."""
