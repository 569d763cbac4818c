"""Tool calls as the families of models write them, one file per family."""
