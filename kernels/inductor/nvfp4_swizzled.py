"""The lowering of ``kernels/nvfp4_swizzled.py``: on a GPU a store with mode "tile_nvfp4", elsewhere a call.

As in ``mx_swizzled.py``, codes and scales of one quantize are in one buffer, codes first, and each quantize of a tensor
is one store of the kernel that computes it. What a tile does is too much to be printed: the kernel calls
``kernels/gpu/nvfp4_tile.py``. The scale of the whole tensor and the seed are read there, where they are in memory.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.lowering import empty_strided, fallback_handler, full, register_lowering
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv

from fp8_compile.kernels.mx_swizzled import COLUMNS, PIECE, ROWS
from fp8_compile.kernels.nvfp4_swizzled import quantize_nvfp4_swizzled_op, quantize_nvfp4_tiles_op
from fp8_compile.kernels.nvfp4_training import SIZE
from fp8_compile.kernels.sum_tiles import TILE_ROWS
from fp8_compile.torch_internals import patches

from .mx_swizzled import label_of, part_of, rows_and_columns, up
from .scatter import scatter_into
from .tiles import WIDE

TILE_NVFP4 = "tile_nvfp4"  # a StoreMode begins with it, followed by the arguments of ``store_nvfp4``
_sizes: dict[str, Any] = {}  # by their text, which is what a mode can hold: those of a dynamic shape are symbols
IMPORT = "from fp8_compile.kernels.gpu import nvfp4_tile"
_fallback = fallback_handler(quantize_nvfp4_swizzled_op, add_to_fallback_set=False)
_tiles_fallback = fallback_handler(quantize_nvfp4_tiles_op, add_to_fallback_set=False)


@register_lowering(quantize_nvfp4_swizzled_op, type_promotion_kind=None)
def _lowering(x: Any, enc: Any, *options: Any) -> Any:
    return (_stored if _is_store(x) else _fallback)(x, enc, *options)


@register_lowering(quantize_nvfp4_tiles_op, type_promotion_kind=None)
def _tiles_lowering(x: Any, enc: Any, factor: float, four_over_six: bool) -> Any:
    if not _is_store(x):
        return _tiles_fallback(x, enc, factor, four_over_six)
    rows, cols = x.get_size()
    parts: list[Any] = []
    for transpose, k in ((False, cols), (True, rows)):
        parts += _stored(x, enc, factor, [SIZE, SIZE], transpose, False, None, 0, four_over_six, k)
    return tuple(parts)


def _is_store(x: Any) -> bool:
    return x.get_device().type != "cpu" and patches.active("tile_sum")


def _stored(
    x: Any,
    enc: Any,
    factor: float,
    block: Any,
    transpose: bool,
    rotated: bool,
    seed: Any,
    stream: int,
    four_over_six: bool,
    numbered: Any,
) -> tuple[Any, Any]:
    """Codes and scales as a store in the kernel that computes x."""
    device, (rows, cols) = x.get_device(), x.get_size()
    outer, k = (cols, rows) if transpose else (rows, cols)
    scales = up(outer, ROWS) * up(FloorDiv(k, SIZE), COLUMNS)
    codes = up(FloorDiv(outer * k, 2), PIECE)
    exact = FloorDiv(outer * k, 2) + FloorDiv(outer * k, SIZE)
    if V.graph.sizevars.statically_known_equals(codes + scales, exact):
        buffer = empty_strided([codes + scales], None, dtype=torch.uint8, device=device)
    else:  # what no scale goes to is 0
        buffer = full([codes + scales], 0, dtype=torch.uint8, device=device)
        buffer.realize()
    numbers = [enc] if seed is None else [enc, seed]
    places = list(map(_place, numbers))
    (enc_name, enc_at), (seed_name, seed_at) = places[0], places[-1]
    load = x.make_loader()

    def values(index: Any) -> Any:
        found = ops.to_dtype(load(index), torch.float32)
        for name, at in places:
            # Not a condition: it makes the kernel depend on what a tile reads. Enc is positive, a seed is not negative.
            number = ops.to_dtype(ops.load(name, sympy.Integer(at)), torch.float32)
            found = ops.where(ops.ge(number, ops.constant(0.0, torch.float32)), found, number)
        return found

    key = str(numbered).replace(" ", "")
    _sizes[key] = sympy.sympify(numbered)
    words = (enc_name, enc_at, seed_name, seed_at, key, factor.hex())
    flags = (transpose, block[0] == SIZE, rotated, seed is not None, four_over_six)
    name = TILE_NVFP4 + WIDE if four_over_six else TILE_NVFP4  # codes by two scales at once
    mode: Any = " ".join([name, *map(str, words), str(stream), *(str(int(flag)) for flag in flags)])
    scatter_into(buffer, values, [rows, cols], label_of(cols), mode)
    return (
        part_of(buffer, torch.uint8, [outer, FloorDiv(k, 2)], [FloorDiv(k, 2), 1], 0),
        part_of(buffer, torch.float8_e4m3fn, [scales], [1], codes),
    )


def _place(number: Any) -> tuple[str, int]:
    """The buffer that one number is in, and where: a scale is a part of the state's table."""
    stored = number.data.unwrap_view() if isinstance(number.data, ir.BaseView) else number.data
    stored.realize()
    stored.freeze_layout()
    part = ir.ExternKernel.realize_input(number)
    return part.get_name(), int(part.get_layout().offset)


@patches.extends("tile_sum", "torch._inductor.codegen.triton.TritonKernel.store")
def _store(self: Any, original: Any, name: str, index: Any, value: Any, mode: Any = None) -> Any:
    """Print the call that stores codes and scales of a tile."""
    if not (isinstance(mode, str) and mode.startswith(TILE_NVFP4)):
        return original(self, name, index, value, mode)
    _, enc, enc_at, seed, seed_at, numbered, factor, stream, *flags = mode.split()
    transpose, square, rotated, random, four_over_six = (flag == "1" for flag in flags)
    rows, cols = rows_and_columns(self, index)
    masks = [tree.mask_name() for tree in (rows, cols) if not self._has_constant_mask(tree)]
    dense = f"tl.broadcast_to({value}, [{TILE_ROWS}, {TILE_ROWS}])"
    inside = f"tl.where({' & '.join(masks)}, {dense}, 0.0)" if masks else dense
    outer, along = (cols, rows) if transpose else (rows, cols)
    sizes = f"{outer.prefix}numel", f"{along.prefix}numel"
    out = self.args.output(name)
    codes = f"({sizes[0]}.to(tl.int64) * {sizes[1]} // 2 + {PIECE - 1}) // {PIECE} * {PIECE}"
    # The function's own module, by a line before the kernel: helpers are printed there.
    if IMPORT not in self.helper_functions.finalized_helpers:
        self.helper_functions.finalized_helpers.append(IMPORT)
    arguments = {
        "x": inside,
        "enc_ptr": f"{self.args.input(enc)} + {enc_at}",
        "seed_ptr": f"{self.args.input(seed)} + {seed_at}",
        "codes_ptr": out,
        "scales_ptr": f"{out} + {codes}",
        "outer_at": f"{outer.prefix}offset",
        "k_at": f"{along.prefix}offset",
        "outer": sizes[0],
        "k": sizes[1],
        "numbered": self.index_to_str(_sizes[numbered]),
        "TURN": transpose != (rows.tensor_dim == 1),
        "FACTOR": float.fromhex(factor),
        "SQUARE": square,
        "ROTATED": rotated,
        "RANDOM": random,
        "STREAM": int(stream),
        "FOUR_OVER_SIX": four_over_six,
        "HARDWARE": V.graph.get_current_device_or_throw().type == "cuda" and torch.version.hip is None,
        "NEGATIVE": "nvfp4_tile.NEGATIVE",
    }
    text = ", ".join(f"{argument}={given}" for argument, given in arguments.items())
    self.stores.writeline(DeferredLine(name, f"nvfp4_tile.store_nvfp4({text})"))
    self.outside_loop_vars.add(value)
