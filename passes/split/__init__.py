"""Passes that run on forward and backward, once it is known what is saved between them."""
