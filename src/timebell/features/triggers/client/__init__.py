"""Client functions of triggers."""
