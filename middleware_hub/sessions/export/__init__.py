"""Trajectories of sessions, as JSON and in binary formats."""
