"""Images in requests: read once, held once, named by the hash of their file's bytes. No pixel is decoded here."""
