"""A job's way through this worker, from the claim to the router's ack."""
