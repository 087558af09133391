"""What every part of the engine needs of its device: memory, transfers, threads, kernel launches."""
