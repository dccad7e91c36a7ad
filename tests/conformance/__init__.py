"""One suite of behaviour, run on every store."""
