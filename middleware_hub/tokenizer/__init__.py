"""Text to ids, ids to text, and how the ids lie over the text."""
