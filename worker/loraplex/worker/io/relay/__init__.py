"""The worker's ends of the relay streams that carry tokens to the routers."""
