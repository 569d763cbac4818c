"""Remembers which exact tokens belong to a text. Plug-ins of the router, named by a dotted path."""
