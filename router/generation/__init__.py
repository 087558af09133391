"""One request's life: admission, takeover, resumption, its last message."""
