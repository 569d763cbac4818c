"""Several routers behind one port of one machine (`--processes`): a parent starts and watches them, and joins their answers."""
