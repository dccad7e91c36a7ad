"""Client functions of an app: validate arguments and call the store."""
