"""What Inductor is taught: lowerings of our operations, and stores of kinds that it does not have.

Importing this package teaches it: whoever puts our operations into a graph for Inductor imports it first.
"""

from . import (
    cast_blocks,
    cheap_ops,
    cublaslt_mm,
    loop_split,
    materialize,
    min_max,
    mx_swizzled,
    nvfp4_swizzled,
    peak_estimate,
    record_amax,
    relayout,
    stack_products,
    sum_tiles,
    tiles,
)

__all__ = [
    "cast_blocks",
    "cheap_ops",
    "cublaslt_mm",
    "loop_split",
    "materialize",
    "min_max",
    "mx_swizzled",
    "nvfp4_swizzled",
    "peak_estimate",
    "record_amax",
    "relayout",
    "stack_products",
    "sum_tiles",
    "tiles",
]
