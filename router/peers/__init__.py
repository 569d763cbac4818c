"""Several routers of one fleet: what they tell each other, and which of them are there."""
