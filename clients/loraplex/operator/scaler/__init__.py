"""The scaler: it tells KEDA, and Prometheus, how many workers each model needs."""
