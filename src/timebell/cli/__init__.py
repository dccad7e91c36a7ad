"""Command line. `main.py` declares the commands; the module of a command is imported when it is called."""
