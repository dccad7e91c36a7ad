"""Parts of triggers that run on a node."""
