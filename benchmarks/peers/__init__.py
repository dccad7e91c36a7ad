"""The peers that Timebell is measured beside, each with its processes, in its best documented configuration."""
