"""Push to many: a campaign's chunks, one job each."""
