"""One generation as its client sees it: request ids, retries after aborts, calls to the whole fleet."""
