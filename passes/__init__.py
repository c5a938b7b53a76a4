"""What happens to a graph: one pass per file. ``pipeline.py`` runs them in order."""
