"""What happens to a graph: one pass a file. ``pipeline.py`` runs them in order."""
