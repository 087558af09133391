"""The jobs that this worker has claimed: their states, and the tokens that their routers have not acked yet."""
