"""Keys and permissions."""
