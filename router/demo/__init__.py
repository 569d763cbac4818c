"""The one-minute shows: `tito-router demo` and `tito-router demo-agent`, everything on one machine, without a GPU."""
