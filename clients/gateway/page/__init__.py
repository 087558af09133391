"""The page of the cluster: its files, and the state that it polls."""
