"""Child processes: their start and end; those that work on hostile data have limits of time and memory."""
