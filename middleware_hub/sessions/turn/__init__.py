"""One turn of a session: prepare, generate, commit."""
