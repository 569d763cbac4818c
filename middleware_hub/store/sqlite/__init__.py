"""The store in a SQLite file: one thread writes in groups, readers never wait for it."""
