"""The other measured systems, each with its processes, in its best documented configuration."""
