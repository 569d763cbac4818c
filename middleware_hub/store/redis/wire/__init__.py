"""Connections to servers: how they are made, shared and restored, and which server has which key."""
