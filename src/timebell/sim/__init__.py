"""Simulation: runs the real engine on virtual time, days in seconds, with the same trace for the same seed."""
