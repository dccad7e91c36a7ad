"""HTTP API, health probes and the metrics endpoint."""
