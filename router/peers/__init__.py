"""Several routers of one fleet: the events that they exchange, and which routers are alive."""
