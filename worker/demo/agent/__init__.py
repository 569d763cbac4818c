"""`tito-router demo-agent`: agents in a session, and the tree of their turns."""
