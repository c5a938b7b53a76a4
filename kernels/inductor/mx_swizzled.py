"""The lowering of ``kernels/mx_swizzled.py``: on a GPU a store with mode "tile_mx", elsewhere a call.

Codes and scales of one quantize are in one buffer, codes first, since a store of Inductor's writes to one: its results
are views of it. A tile of the kernel finds the amaxes of its blocks, the bytes of the scales by integer arithmetic, and
stores codes and scales; two quantizes of a tensor are two stores of one kernel, which reads the tensor once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.lowering import empty_strided, fallback_handler, full, register_lowering
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv

from fp8_compile.kernels.mx_swizzled import COLUMNS, PIECE, ROWS, directions, quantize_mx_swizzled_op
from fp8_compile.kernels.mxfp8 import SIZE
from fp8_compile.kernels.sum_tiles import TILE_ROWS
from fp8_compile.torch_internals import patches

from .scatter import scatter_into

TILE_MX = "tile_mx"  # a StoreMode begins with it, followed by the block and by whether codes are transposed
_fallback = fallback_handler(quantize_mx_swizzled_op, add_to_fallback_set=False)


@register_lowering(quantize_mx_swizzled_op, type_promotion_kind=None)
def _lowering(x: Any, block: Any, transposed: bool = False) -> Any:
    device, (rows, cols) = x.get_device(), x.get_size()
    if device.type == "cpu" or not patches.active("tile_sum"):
        return _fallback(x, block, transposed)
    along_columns, along_rows = directions(tuple(block))
    codes = up(rows * cols, PIECE)
    sizes = [
        _scales_size(rows, cols) if along_columns else 0,
        _scales_size(cols, rows) if along_rows else 0,
    ]
    total = codes + sum(sizes)
    exact = V.graph.sizevars.statically_known_equals(
        total, rows * cols + sum(FloorDiv(rows * cols, SIZE) for size in sizes if size != 0)
    )
    if exact:
        buffer = empty_strided([total], None, dtype=torch.uint8, device=device)
    else:  # what no scale goes to is 0
        buffer = full([total], 0, dtype=torch.uint8, device=device)
        buffer.realize()
    load = x.make_loader()

    def values(index: Any) -> Any:
        return ops.to_dtype(load(index), torch.float32)

    mode: Any = f"{TILE_MX} {block[0]} {block[1]} {int(transposed)}"
    scatter_into(buffer, values, [rows, cols], label_of(cols), mode)
    strides = [1, rows] if transposed else [cols, 1]
    q = part_of(buffer, torch.float8_e4m3fn, [rows, cols], strides, 0)
    scale = part_of(buffer, torch.uint8, [sizes[0]], [1], codes)
    scale_t = part_of(buffer, torch.uint8, [sizes[1]], [1], codes + sizes[0])
    return q, scale, scale_t


def label_of(cols: Any) -> Callable[[Any], Any]:
    """What a store of tiles has for a place. Not an address: it prints its own. It tells rows from columns
    (``rows_and_columns``) and keeps Inductor from making one loop of both."""

    def label(index: Any) -> Any:
        return [FloorDiv(index[0], SIZE) * FloorDiv(cols, SIZE) + FloorDiv(index[1], SIZE // 2)]

    return label


def rows_and_columns(kernel: Any, label: Any) -> tuple[Any, Any]:
    """Which of a kernel's dimensions are those of the matrix."""
    (col,) = {
        symbol for part in label.atoms(FloorDiv) if part.args[1] == SIZE // 2 for symbol in part.args[0].free_symbols
    }
    cols = kernel.range_tree_nodes[col].root
    (rows,) = (tree for tree in kernel.range_trees if tree is not cols and not tree.is_reduction)
    return rows, cols


def up(size: Any, multiple: int) -> Any:
    return FloorDiv(size + multiple - 1, multiple) * multiple


def _scales_size(outer: Any, inner: Any) -> Any:
    return up(outer, ROWS) * up(FloorDiv(inner + SIZE - 1, SIZE), COLUMNS)


def part_of(buffer: Any, dtype: torch.dtype, size: list[Any], stride: list[Any], offset: Any) -> Any:
    layout = ir.FixedLayout(buffer.get_device(), dtype, size, stride, offset)
    return ir.TensorBox(ir.ReinterpretView(data=buffer.data, layout=layout))


@patches.extends("tile_sum", "torch._inductor.codegen.triton.TritonKernel.store")
def _store(self: Any, original: Any, name: str, index: Any, value: Any, mode: Any = None) -> Any:
    """Print codes and scales of a tile."""
    if not (isinstance(mode, str) and mode.startswith(TILE_MX)):
        return original(self, name, index, value, mode)
    rows, cols = rows_and_columns(self, index)
    block_rows, block_cols, transposed = map(int, mode.split()[1:])
    tile = _Tile(self, rows, cols, f"{value}_{block_rows}_{block_cols}", self.args.output(name))
    for line in tile.lines(value, (block_rows, block_cols), bool(transposed)):
        self.stores.writeline(DeferredLine(name, line))
    self.outside_loop_vars.add(value)


class _Tile:
    """The text of one store. ``name``: what the names of its variables begin with."""

    def __init__(self, kernel: Any, rows: Any, cols: Any, name: str, pointer: str) -> None:
        self.kernel, self.rows, self.cols, self.name, self.pointer = kernel, rows, cols, name, pointer
        trees = sorted((rows, cols), key=lambda tree: tree.tensor_dim)
        assert [tree.tensor_dim for tree in trees] == [0, 1], trees
        self.trees = trees

    def lines(self, value: Any, block: tuple[int, int], transposed: bool) -> list[str]:
        """Everything that a tile stores."""
        n, kernel = self.name, self.kernel
        split = [block[0] == SIZE, block[1] == SIZE]  # rows, columns
        by_dim = [split[0 if tree is self.rows else 1] for tree in self.trees]
        masks = [tree.mask_name() for tree in self.trees if not kernel._has_constant_mask(tree)]
        dense = f"tl.broadcast_to({value}, [{TILE_ROWS}, {TILE_ROWS}])"
        inside = f"tl.where({' & '.join(masks)}, {dense}, 0.0)" if masks else dense
        shape = [part for cut in by_dim for part in ((TILE_ROWS // SIZE, SIZE) if cut else (TILE_ROWS,))]
        axes = [1] if by_dim == [True, False] else [2] if by_dim == [False, True] else [3, 1]
        bits = f"tl.reshape({inside}, {shape}).to(tl.int32, bitcast=True) & 0x7FFFFFFF"
        lines = [f"{n}_amax = {bits}"]
        # As integers: a maximum of floats loses NaN.
        lines += [f"{n}_amax = tl.max({n}_amax, {axis}, keep_dims=True)" for axis in axes]
        reciprocal = "0.002232142857142857"  # 1 / 448
        lines += [
            f"{n}_d = ({n}_amax.to(tl.float32, bitcast=True) * {reciprocal}).to(tl.int32, bitcast=True)",
            f"{n}_up = tl.where({n}_d < 0x800000, {n}_d > 0x400000, ({n}_d & 0x7FFFFF) != 0)",
            f"{n}_byte = tl.minimum(({n}_d >> 23) + {n}_up.to(tl.int32), 255)",
            # 2**(127 - byte), whose exponent field is 254 - byte: a subnormal for 254, NaN for 255
            f"{n}_power = tl.where({n}_byte == 255, 0x7FC00000, (254 - {n}_byte) << 23)",
            f"{n}_power = tl.where({n}_byte == 254, 0x400000, {n}_power)",
            f"{n}_power = tl.broadcast_to({n}_power.to(tl.float32, bitcast=True), {shape})",
            f"{n}_codes = {inside} * tl.reshape({n}_power, [{TILE_ROWS}, {TILE_ROWS}])",
            f"{n}_codes = {n}_codes.to(tl.float8e4nv).to(tl.uint8, bitcast=True)",
        ]
        row, col = self._index(self.rows), self._index(self.cols)
        rows, cols = self._size(self.rows), self._size(self.cols)
        place = f"{col} * {rows} + {row}" if transposed else f"{row} * {cols} + {col}"
        mask = " & ".join(masks) or "None"
        lines.append(f"tl.store({self.pointer} + ({place}), {n}_codes, {mask})")
        start = f"({rows} * {cols} + {PIECE - 1}) // {PIECE} * {PIECE}"
        if split[1]:
            lines += self._scales(self.rows, self.cols, by_dim, start)
            start += f" + ({rows} + {ROWS - 1}) // {ROWS} * {ROWS} * (({cols} + 127) // 128 * {COLUMNS})"
        if split[0]:
            lines += self._scales(self.cols, self.rows, by_dim, start)
        return lines

    def _scales(self, outer: Any, inner: Any, by_dim: list[bool], start: str) -> list[str]:
        """The scales with K along ``inner``, one per row of ``outer``, swizzled."""
        n, kernel = self.name, self.kernel
        blocks = TILE_ROWS // SIZE
        shape = [blocks if tree is inner else TILE_ROWS for tree in self.trees]
        parts = [
            part
            for tree, cut in zip(self.trees, by_dim)
            for part in ((blocks,) if tree is inner else (blocks, SIZE) if cut else (TILE_ROWS,))
        ]
        # without the dimension of what is inside a block of K
        kept = [
            part
            for tree, cut in zip(self.trees, by_dim)
            for part in ((blocks,) if tree is inner else (blocks, 1) if cut else (TILE_ROWS,))
        ]
        byte = f"tl.reshape({n}_byte, {kept})"
        if parts != kept:
            byte = f"tl.broadcast_to({byte}, {parts})"
        byte = f"tl.reshape({byte}, {shape}).to(tl.uint8)"
        r = self._along(outer, f"{outer.prefix}offset + tl.arange(0, {TILE_ROWS})")
        c = self._along(inner, f"{inner.prefix}offset // {SIZE} + tl.arange(0, {blocks})")
        pieces = f"(({self._size(inner)} + 127) // 128)"
        place = (
            f"(({n}_r // 128) * {pieces} + {n}_c // 4) * {PIECE}"
            f" + ({n}_r % 32) * 16 + ({n}_r % 128 // 32) * 4 + {n}_c % 4"
        )
        masks = []
        if not kernel._has_constant_mask(outer):
            masks.append(f"({n}_r < {self._size(outer)})")
        if not kernel._has_constant_mask(inner):
            masks.append(f"({n}_c * {SIZE} < {self._size(inner)})")
        return [
            f"{n}_r = {r}",
            f"{n}_c = {c}",
            f"tl.store({self.pointer} + ({start} + {place}), {byte}, {' & '.join(masks) or 'None'})",
        ]

    def _index(self, tree: Any) -> str:
        return f"{tree.prefix}index"

    def _along(self, tree: Any, text: str) -> str:
        return f"({text})[{':, None' if tree.tensor_dim == 0 else 'None, :'}]"

    def _size(self, tree: Any) -> str:
        return f"{tree.prefix}numel"
