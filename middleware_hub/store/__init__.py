"""The store: what was recorded, beyond the life of a process."""
