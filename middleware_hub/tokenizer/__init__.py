"""Text to ids, ids to text, and how the two lie over each other."""
