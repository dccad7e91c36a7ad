"""The command line. `main.py` says what there is; the rest is imported when a command needs it."""
