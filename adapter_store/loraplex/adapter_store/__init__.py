"""The adapter store: adapters and their tenants, their immutable revisions, and the base models of these."""
