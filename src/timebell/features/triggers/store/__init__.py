"""Repositories of triggers."""
