"""ASGI helpers, limits of a connection, the HTTP client towards the workers."""
