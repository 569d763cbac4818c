"""`tito-router drift`: what a loop that re-encodes its text trains wrongly."""
