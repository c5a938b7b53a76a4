"""Passes that run before the graph is split into forward and backward."""
