"""LoRA on CUDA: Triton kernels over adapter slots at fixed addresses."""
