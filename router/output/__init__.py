"""Turns token ids into the events that a client receives."""
