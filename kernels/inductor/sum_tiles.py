"""Sum the columns of a matrix over tiles of its rows, inside whatever kernel computes the matrix.

    y[i, n] = sum of x[m, n] over TILE * i <= m < TILE * (i + 1)        x: [M, N] -> y: [ceil(M / TILE), N] fp32

A bias's gradient is a sum over the rows of a gradient that is also quantized. To Inductor that is a reduction: a kernel
of its own, which reads the gradient, or all that it is computed from, once more. Here it is a store: a pointwise value
stored with mode "tile_sum", which Inductor fuses like any other store into the kernel that quantizes. That kernel
works on tiles of TILE x TILE; each sums its columns and writes them once, so that the result never varies. What is
left to sum is a TILE-th of the rows.

The functions at the end teach Inductor 2.13 that mode, for Triton, and change nothing for kernels without such a store.
"""

from __future__ import annotations

from typing import Any, Iterable

import sympy
import torch
from torch._inductor import ir
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.codegen.triton import FixedTritonConfig, TritonKernel
from torch._inductor.dependencies import MemoryDep
from torch._inductor.lowering import empty_strided, fallback_handler, register_lowering
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.utils import sympy_subs
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv

from .extend import extend

TILE = 64  # FP8 rows of 64 bytes: two sectors of a GPU's memory, in either layout
LAUNCH = FixedTritonConfig({"XBLOCK": TILE, "YBLOCK": TILE, "num_warps": 8, "num_stages": 1})
TILE_SUM = "tile_sum"


def sum_tiles(x: torch.Tensor) -> torch.Tensor:
    """The formula above in plain PyTorch."""
    rows, cols = x.shape
    return torch.nn.functional.pad(x.float(), (0, 0, 0, -rows % TILE)).view(-1, TILE, cols).sum(1)


def _fake(x: torch.Tensor) -> torch.Tensor:
    rows, cols = x.shape
    return x.new_empty(((rows + TILE - 1) // TILE, cols), dtype=torch.float32)


_library = torch.library.Library("fp8_compile", "FRAGMENT")
_library.define("sum_tiles(Tensor x) -> Tensor")
_library.impl("sum_tiles", sum_tiles, "CompositeExplicitAutograd")
torch.library.register_fake("fp8_compile::sum_tiles", _fake, lib=_library)
sum_tiles_op = torch.ops.fp8_compile.sum_tiles.default
_fallback = fallback_handler(sum_tiles_op, add_to_fallback_set=False)


@register_lowering(sum_tiles_op, type_promotion_kind=None)
def _lowering(x):  # type: ignore[no-untyped-def]
    device = x.get_device()
    if device.type == "cpu":
        return _fallback(x)
    rows, cols = x.get_size()
    sums = empty_strided([FloorDiv(rows + TILE - 1, TILE), cols], None, dtype=torch.float32, device=device)
    load = x.make_loader()
    scatter = ir.Scatter(
        device=device,
        dtype=torch.float32,
        inner_fn=lambda index: ops.to_dtype(load(index), torch.float32),
        ranges=[rows, cols],
        output_indexer=lambda index: [FloorDiv(index[0], TILE), index[1]],
        scatter_mode=TILE_SUM,
    )
    buffer = ir.ComputedBuffer(name=None, layout=ir.MutationLayoutSHOULDREMOVE(sums), data=scatter)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)
    return sums


@extend(TritonKernel, "store")
def _store(self, original, name, index, value, mode=None):  # type: ignore[no-untyped-def]
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


@extend(SIMDScheduling, "can_fuse_vertical", "can_fuse_horizontal")
def _can_fuse(self, original, node1, node2):  # type: ignore[no-untyped-def]
    """Sums of tiles go with what can be computed tile by tile: not with reductions, nor with another order of loops."""
    nodes = [*node1.get_nodes(), *node2.get_nodes()]
    tilings = _tilings(nodes)
    if tilings and (len(set(tilings)) > 1 or not _in_tiles(nodes, tilings[0])):
        return False
    return original(self, node1, node2)


@extend(InductorChoices, "triton_kernel_kwargs")
def _triton_kernel_kwargs(self, original, kernel, features, groups, options):  # type: ignore[no-untyped-def]
    """A kernel with sums of tiles has rows and columns for its two dimensions, and its blocks are the tiles."""
    options = original(self, kernel, features, groups, options)
    tilings = _tilings(nodes := features.scheduler_nodes())
    if tilings:
        assert len(set(tilings)) == 1 and _in_tiles(nodes, tilings[0]), f"{tilings} in one kernel"
        groups[0] = SIMDScheduling.create_tiling(tilings[0], [sympy.S.One])
        options["fixed_config"] = LAUNCH
    return options


def _tilings(nodes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """(M, N), or (N, M) where Inductor changed the order of loops, for each of the nodes that stores sums of tiles."""
    return [tuple(node.get_ranges()[0]) for node in nodes if isinstance(node, SchedulerNode) and _sums_tiles(node)]


def _sums_tiles(node: SchedulerNode) -> bool:
    return any(isinstance(dep, MemoryDep) and dep.mode == TILE_SUM for dep in node.read_writes.writes)


def _in_tiles(nodes: Iterable[Any], tiling: tuple[Any, ...]) -> bool:
    """Whether each node's loops can be split into the two of the tiling."""
    groups = SIMDScheduling.create_tiling(tiling, [sympy.S.One])
    nodes = list(nodes)
    pointwise = not any(node.is_reduction() for node in nodes)
    return pointwise and SIMDScheduling.tiling_is_compatible(nodes, sympy.prod(tiling), sympy.S.One, groups)
