"""What Inductor is taught: lowerings of our operations, and stores of kinds that it does not have."""
