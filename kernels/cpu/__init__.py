"""C++ for CPUs: compiled on first use, called through operations that the graph sees as opaque."""
