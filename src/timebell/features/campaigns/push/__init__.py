"""Push notifications: message model, provider interface, FCM, and the `push` target."""
