"""Push messages to phones: what a message is, what a provider answers, FCM, and the target that sends them."""
