"""`tito-router store`: look into a store, check it, export what is in it, and prune it, beside the routers that use it."""
