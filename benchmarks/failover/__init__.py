"""Failover and outages of the database: `python -m benchmarks failover [fault,...] [--store mariadb]`."""
