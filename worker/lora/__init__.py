"""LoRA adapters on the device: reading them, keeping them in slots, applying a different one to every row."""
