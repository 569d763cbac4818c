"""Keys, permissions, and who is calling."""
