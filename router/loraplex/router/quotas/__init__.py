"""Quotas of tenants: their plans, and reservations of tokens in the ledger."""
