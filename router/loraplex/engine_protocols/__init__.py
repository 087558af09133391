"""Protocols that gateways speak to engines, which a router serves beside its own: `--engine-protocol`."""
