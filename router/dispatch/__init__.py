"""Attempts of jobs: enqueueing, binding to a worker, recovery, the relay streams from workers."""
