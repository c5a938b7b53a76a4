"""Packed weights in files that other programs read and write."""
