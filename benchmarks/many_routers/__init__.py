"""Many routers on one store, under load and faults: counts what clients were told, and compares it with the store."""
