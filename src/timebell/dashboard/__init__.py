"""The dashboard: server-rendered pages on top of the HTTP API."""
