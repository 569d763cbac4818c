"""Conversations as the inspector sees them: of the radix tree, and of sessions."""
