"""The inspector: what is remembered, shown token by token. A page, the JSON API behind it, and reports."""
