"""One call to `/generate`: what the worker is sent for a text, and what its client is answered."""
