"""The lowering of ``kernels/sum_tiles.py``: on a GPU a store with mode "tile_sum", elsewhere a call.

The kernel works on square tiles of TILE_ROWS; each sums its columns and writes them once, so that the result never
varies. The function at the end prints that store; ``tiles.py`` says which kernels have tiles. Where they do not fit the
installed torch, the sums are a call on a GPU, too.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.lowering import empty_strided, fallback_handler, register_lowering
from torch._inductor.utils import sympy_subs
from torch._inductor.virtualized import ops
from torch.utils._sympy.functions import FloorDiv

from fp8_compile.kernels.sum_tiles import TILE_ROWS, sum_tiles_op
from fp8_compile.torch_internals import patches

from .scatter import scatter_into

TILE_SUM: Any = "tile_sum"  # a StoreMode
_fallback = fallback_handler(sum_tiles_op, add_to_fallback_set=False)


@register_lowering(sum_tiles_op, type_promotion_kind=None)
def _lowering(x: Any) -> Any:
    device = x.get_device()
    if device.type == "cpu" or not patches.active("tile_sum"):
        return _fallback(x)
    rows, cols = x.get_size()
    tiles = FloorDiv(rows + TILE_ROWS - 1, TILE_ROWS)
    sums = empty_strided([tiles, cols], None, dtype=torch.float32, device=device)
    load = x.make_loader()

    def place(index: Any) -> Any:
        return [FloorDiv(index[0], TILE_ROWS), index[1]]

    def values(index: Any) -> Any:
        return ops.to_dtype(load(index), torch.float32)

    scatter_into(sums, values, [rows, cols], place, TILE_SUM)
    return sums


@patches.extends("tile_sum", "torch._inductor.codegen.triton.TritonKernel.store")
def _store(self: Any, original: Any, name: str, index: Any, value: Any, mode: Any = None) -> Any:
    """Print the sums of a tile: a row of them, at the place of the tile's first row."""
    if mode != TILE_SUM:
        return original(self, name, index, value, mode)
    (row,) = {symbol for part in index.atoms(FloorDiv) for symbol in part.free_symbols}
    rows = self.range_tree_nodes[row].root
    (cols,) = (tree for tree in self.range_trees if tree is not rows and not tree.is_reduction)
    row_mask, col_mask = (None if self._has_constant_mask(tree) else tree.mask_name() for tree in (rows, cols))
    masks = [mask for mask in (row_mask, col_mask) if mask]
    dense = f"tl.broadcast_to({value}, {self.dense_size_str()})"  # a value may lack a dimension that a mask has
    inside = f"tl.where({' & '.join(masks)}, {dense}, 0.0)" if masks else dense
    sums = f"tl.sum({inside}, {rows.tensor_dim}, keep_dims=True)"
    first = sympy_subs(index, {row: sympy.Symbol(f"{rows.prefix}offset", integer=True, nonnegative=True)})
    place = f"{self.args.output(name)} + ({self.index_to_str(first)})"
    self.stores.writeline(DeferredLine(name, f"tl.store({place}, {sums}, {col_mask})"))
    self.outside_loop_vars.add(value)
