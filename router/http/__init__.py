"""ASGI helpers, and the HTTP client towards the workers."""
