"""Trainers: slime, verl and miles, and a packer of trees. Each module is imported where its trainer is installed."""
