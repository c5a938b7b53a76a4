"""A model becomes a package that was compiled ahead of time, and is loaded from one."""
