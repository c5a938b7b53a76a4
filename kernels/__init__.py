"""What happens to a tensor: one operation a file, its plain-PyTorch reference beside it."""
