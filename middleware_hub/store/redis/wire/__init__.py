"""Connections to servers: made, shared, made again, and asked; who has which key."""
