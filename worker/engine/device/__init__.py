"""The engine's device: free memory, transfers, threads, kernel launches."""
