"""Client functions of an app: validate arguments, call the store and wake the engine."""
