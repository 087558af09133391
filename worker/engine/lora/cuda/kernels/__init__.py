"""Triton kernels of LoRA on CUDA. Nothing here is imported on the CPU: Triton may be absent."""
