"""The inspector: shows what is remembered, token by token. A page, the JSON API behind it, and reports."""
