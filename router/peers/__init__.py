"""Several routers of one fleet: what they tell each other, and who of them is there."""
