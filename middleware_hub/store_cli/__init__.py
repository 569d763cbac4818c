"""`tito-router store`: inspect, check, export and prune a store while routers use it."""
