"""The demonstrations `tito-router demo` and `tito-router demo-agent`: a minute each, on one machine, without a GPU."""
