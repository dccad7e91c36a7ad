"""Django template tags."""
