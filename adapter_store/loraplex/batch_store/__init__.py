"""Files of requests and batches of their lines, as the store keeps them. A store loads its `service` by its name."""
