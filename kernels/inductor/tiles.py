"""Stores of kinds of ours that look at a tile of a matrix: its sums (``sum_tiles.py``), its codes and scales
(``mx_swizzled.py``).

A kernel with such a store works on square tiles, whose rows and columns are its two dimensions. The functions in this
file teach Inductor that, for Triton, and change nothing for other kernels. What a tile stores is printed where the mode
is defined; the modes' names begin with "tile_".
"""

from __future__ import annotations

from typing import Any, Iterable

import sympy
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.dependencies import MemoryDep
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V

from fp8_compile.kernels.sum_tiles import TILE_ROWS
from fp8_compile.torch_internals import patches

PREFIX = "tile_"
WIDE = "_wide"  # the first word of a mode ends with it: a tile needs more registers than 8 warps have


@patches.extends(
    "tile_sum",
    "torch._inductor.codegen.simd.SIMDScheduling.can_fuse_vertical",
    "torch._inductor.codegen.simd.SIMDScheduling.can_fuse_horizontal",
)
def _can_fuse(self: Any, original: Any, node1: Any, node2: Any) -> bool:
    """Tiles go with what can be computed tile by tile: not with reductions, nor with another order of loops."""
    nodes = [*node1.get_nodes(), *node2.get_nodes()]
    tilings = _tilings(nodes)
    if tilings and (len(set(tilings)) > 1 or not _in_tiles(nodes, tilings[0])):
        return False
    return bool(original(self, node1, node2))


@patches.extends("tile_sum", "torch._inductor.choices.InductorChoices.triton_kernel_kwargs")
def _triton_kernel_kwargs(
    self: Any, original: Any, kernel: Any, features: Any, groups: list[Any], options: dict[str, Any]
) -> dict[str, Any]:
    """A kernel with stores of tiles has rows and columns for its two dimensions, and its blocks are the tiles."""
    options = original(self, kernel, features, groups, options)
    tilings = _tilings(nodes := features.scheduler_nodes())
    if tilings:
        assert len(set(tilings)) == 1 and _in_tiles(nodes, tilings[0]), f"{tilings} in one kernel"
        groups[0] = SIMDScheduling.create_tiling(tilings[0], [sympy.S.One])
        blocks = {"XBLOCK": TILE_ROWS, "YBLOCK": TILE_ROWS}
        warps = 16 if any(map(_is_wide, modes_of(nodes))) else 8
        options["fixed_config"] = FixedTritonConfig({**blocks, "num_warps": warps, "num_stages": 1})
    return options


def _tilings(nodes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """(M, N), or (N, M) where Inductor changed the order of loops, for each of the nodes that stores tiles."""
    return [tuple(node.get_ranges()[0]) for node in nodes if isinstance(node, SchedulerNode) and _stores_tiles(node)]


def _stores_tiles(node: SchedulerNode) -> bool:
    return any(map(is_tile, modes_of([node])))


def modes_of(nodes: Iterable[Any]) -> list[Any]:
    """How the nodes store what they compute."""
    ours = [node for node in nodes if isinstance(node, SchedulerNode)]
    return [dep.mode for node in ours for dep in node.read_writes.writes if isinstance(dep, MemoryDep)]


def _is_wide(mode: Any) -> bool:
    return is_tile(mode) and mode.split()[0].endswith(WIDE)


def is_tile(mode: Any) -> bool:
    """True for a mode of stores that looks at a tile."""
    return isinstance(mode, str) and mode.startswith(PREFIX)


def _in_tiles(nodes: Iterable[Any], tiling: tuple[Any, ...]) -> bool:
    """True if each node's loops can be split into the two of the tiling."""
    nodes, numel = list(nodes), sympy.prod(tiling)
    if any(node.is_reduction() for node in nodes):
        return False
    ours = [node for node in nodes if isinstance(node, SchedulerNode)]
    if not all(V.graph.sizevars.statically_known_equals(sympy.prod(node.get_ranges()[0]), numel) for node in ours):
        return False  # such as a norm's scale, one per row
    return bool(
        SIMDScheduling.tiling_is_compatible(
            nodes, numel, sympy.S.One, SIMDScheduling.create_tiling(tiling, [sympy.S.One])
        )
    )
