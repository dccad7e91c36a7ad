"""Types and pure functions of triggers."""
