"""A file that this user can read and not write: a backup, a read-only mount, the store of another user."""
