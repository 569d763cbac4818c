"""The version of both distributions: their pyproject.toml read it out of this file."""

__version__ = "0.1.0"
