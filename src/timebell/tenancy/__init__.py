"""Roles, API keys, users, secrets and limits of tenants."""
