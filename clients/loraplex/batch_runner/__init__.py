"""Runs batches: a client of the store, which leases it batches, and of routers, which answer their lines."""
