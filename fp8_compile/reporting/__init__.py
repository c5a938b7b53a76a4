"""What was done, to be looked at: dumps of graphs, and the page."""
