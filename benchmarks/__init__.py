"""The figures of Timebell beside a peer's: `python -m benchmarks`; see README.md."""
