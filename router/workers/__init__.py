"""Workers: their states, their pool, the queue for them, and their probes."""
