"""The router from outside: load, sessions, and what one request does to the others."""
