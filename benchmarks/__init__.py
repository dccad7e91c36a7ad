"""Benchmarks of Timebell and of other systems: `python -m benchmarks`; see README.md."""
