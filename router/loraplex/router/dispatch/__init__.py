"""Attempts of jobs: enqueueing, binding to a worker, recovery, and the relay streams from workers."""
