"""Several routers of one fleet: what they exchange, and which of them are alive."""
