"""The words and tools that passes are written with. No module here is a pass."""
