"""Campaigns: push messages to many devices, sent in chunks of one job each."""
