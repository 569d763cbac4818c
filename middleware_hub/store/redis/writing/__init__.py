"""Writing: batches are prepared, gathered into groups, and appended to one server or to the nodes of a cluster."""
