"""What happens around ``optimizer.step()``: :func:`fp8_compile.attach` and its parts, one file for each."""
