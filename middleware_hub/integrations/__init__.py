"""Trainers: slime, verl and miles, and a packer of trees. Each module is imported only where its trainer is installed."""
