"""Tests of the live engine: on virtual time over SQLite, and with several nodes on PostgreSQL."""
