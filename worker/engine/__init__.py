"""The engine: admission, sampling, stop conditions. No HTTP."""
