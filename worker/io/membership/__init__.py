"""The worker as the cluster sees it: registration, liveness key, reported state, health."""
