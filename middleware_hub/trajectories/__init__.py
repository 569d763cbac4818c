"""Groups of rollouts, their rewards, and the claims by which trainers take them: each at most once."""
