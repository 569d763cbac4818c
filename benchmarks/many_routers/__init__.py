"""Many routers on one store, under load and faults: what clients were told is counted, and compared with what is there."""
