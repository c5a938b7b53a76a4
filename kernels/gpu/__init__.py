"""Triton kernels for NVIDIA and AMD GPUs: one operation a file, its plain-PyTorch reference beside it."""
