"""Launch a Triton kernel again and again with arguments of the same kinds, for little host time.

``kernel[grid](...)`` finds out at each launch what its arguments are, writes that down as text, and looks up the code
for it, which takes ten microseconds for a kernel with many constants. ``Launch`` does that once. Afterwards it gives
the arguments to the compiled kernel itself, which takes three (``benchmarks/host_time_gpu.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.compiler import CompiledKernel


class Launch:
    """Launches whose arguments differ in nothing that Triton compiles by: dtypes, constants, the device, which integers
    are 1, and which integers and addresses are multiples of 16. The caller sees to that."""

    def __init__(self, grid: tuple[int, int, int], num_warps: int) -> None:
        self.grid, self.num_warps = grid, num_warps
        self._compiled: Callable[..., None] | None = None

    def __call__(self, kernel: Any, *arguments: Any) -> None:
        """All parameters of the kernel in their order, constants among them; on the current device and stream."""
        if self._compiled is not None:
            self._compiled(*arguments)
            return
        compiled = kernel[self.grid](*arguments, num_warps=self.num_warps)
        if isinstance(compiled, CompiledKernel):  # an interpreted kernel is none
            self._compiled = compiled[self.grid]
