"""What is computed beside requests: drift, figures over all that is remembered, and files to take away."""
