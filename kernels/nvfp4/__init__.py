"""NVFP4 weights: 4-bit values, an E4M3 scale per block, one FP32 scale for all. Each file is a way to choose them."""
