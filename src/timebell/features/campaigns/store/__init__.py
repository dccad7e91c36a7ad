"""Repositories of campaigns."""
