"""The pages. So far one: what is next and what just ran, read-only."""
