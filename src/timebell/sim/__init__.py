"""The engine itself on virtual time: days in seconds, and the same trace for the same seed."""
