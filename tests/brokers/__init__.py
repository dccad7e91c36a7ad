"""Queues as targets, each against its server."""
