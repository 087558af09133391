"""Weights of linear layers in few bits, with scales: what a quantized base model consists of."""
