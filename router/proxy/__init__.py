"""One request: choose a worker, lease it, send, stream the reply, try elsewhere."""
