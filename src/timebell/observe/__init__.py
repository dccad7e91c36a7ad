"""Observability: counters, metrics, the watchdog and alerts."""
