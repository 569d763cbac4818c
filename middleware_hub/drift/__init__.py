"""`tito-router drift`: the sampled tokens that a loop replaces because it encodes its text again."""
