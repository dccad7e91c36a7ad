"""Parts of campaigns that run on a node."""
