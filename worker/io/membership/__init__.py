"""How the cluster sees this worker: registration, liveness key, reported state, health."""
