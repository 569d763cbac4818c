"""The inspector: shows the recorded tokens. A page, the JSON API behind it, and reports."""
