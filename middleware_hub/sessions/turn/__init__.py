"""One turn of a session: prepare, tokenize, generate, commit."""
