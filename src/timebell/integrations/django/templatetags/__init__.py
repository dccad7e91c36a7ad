"""Where Django looks for tags."""
