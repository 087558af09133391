"""The removal of a tenant's data from a cell: routers, Redis and workers."""
