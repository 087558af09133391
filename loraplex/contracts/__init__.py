"""Contracts between processes: a request's options, artifacts of the store, grammars, and what stands in Redis."""
