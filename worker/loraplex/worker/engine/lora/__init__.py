"""Reading LoRA adapters, and applying a different one to each row of a step."""
