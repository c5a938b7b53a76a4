"""Weights become packed weights: calibration, packing, and the modules that hold the result."""
