"""The edge towards clients: the server, its connections and their limits, and errors as JSON."""
