"""Grafana dashboards and Prometheus rules of a cluster."""
