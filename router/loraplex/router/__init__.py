"""The router: takes Generate calls, queues jobs, relays tokens, and keeps every stream alive."""
