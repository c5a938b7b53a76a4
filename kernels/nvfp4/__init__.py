"""NVFP4 weights: 4-bit values, an E4M3 scale a block, one FP32 scale for all. One way to choose them a file."""
