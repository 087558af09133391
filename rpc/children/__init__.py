"""Child processes that work on hostile data, with limits of time and memory; they may be killed."""
