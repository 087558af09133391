"""LoRA on the CPU: one compiled kernel that reads adapters in host memory."""
