"""Adapter bytes on this worker's disk: fetched by digest, verified, kept within a budget."""
