"""Types and pure functions of campaigns."""
