"""Sessions in a store: each is a log of events, whose new part every router reads before it serves a call."""
