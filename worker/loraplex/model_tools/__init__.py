"""Offline tools for models and adapters: write quantized copies, convert GGUF, report and certify quality."""
