"""The engine process as the I/O process sees it: start, messages, death, stall."""
