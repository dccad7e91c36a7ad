"""Client functions of campaigns."""
