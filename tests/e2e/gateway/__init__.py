"""The HTTP gateway with the real clients of its protocols, in front of a cluster with the hash model."""
