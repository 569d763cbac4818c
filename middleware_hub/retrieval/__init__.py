"""The tokens behind a text, for a trainer: what is asked, what is found, and how that is written."""
