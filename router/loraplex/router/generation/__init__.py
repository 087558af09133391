"""The life of a request: admission, takeover, resumption, the loop of its messages."""
