"""Triton kernels for NVIDIA and AMD GPUs: one operation per file, its plain-PyTorch reference beside it."""
