"""Imports of adapters from places outside the cluster, and exports to registries."""
