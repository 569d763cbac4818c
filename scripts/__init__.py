"""Programs that make files of this project."""
