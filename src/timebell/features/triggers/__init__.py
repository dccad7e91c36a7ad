"""Triggers: jobs at the instants in a column of an external source."""
