"""What there is to tell: counts, metrics, the watchdog, alerts."""
