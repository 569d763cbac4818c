"""The routing policies, simulated and under load."""
