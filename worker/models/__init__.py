"""Where sampled tokens come from: an n-gram model, noise, a prepared pool."""
