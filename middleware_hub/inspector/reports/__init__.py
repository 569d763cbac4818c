"""Background work: drift, figures over everything that is remembered, and files to download."""
