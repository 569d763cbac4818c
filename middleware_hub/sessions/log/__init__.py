"""Sessions beyond their process: each is a log of events in a store, which every router reads on before it serves a call."""
