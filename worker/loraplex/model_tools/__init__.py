"""What computes with models and adapters offline: quantized copies, reads of GGUF, reports and certificates."""
