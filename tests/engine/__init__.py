"""The real engine: on virtual time over SQLite, and several nodes on PostgreSQL."""
