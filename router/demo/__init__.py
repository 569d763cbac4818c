"""`tito-router demo`: the whole of it on one machine, in a minute, with a table at the end."""
