"""Decoder layers on the CPU: compiled kernels between the linear layers, and whole steps of layers as one call."""
