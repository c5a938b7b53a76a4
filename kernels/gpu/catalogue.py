"""Every kernel with the arguments it is compiled for ahead of time: tests and the benchmark take them from here.

An entry is a kernel in one configuration: bf16 in, a gradient's E5M2 or an input's E4M3 out, rows that are contiguous.
MI300 (gfx942) has FP8 formats of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from . import (
    ahead_of_time,
    fp8_weight_grad,
    nvfp4_grad,
    nvfp4_matmul,
    nvfp4_pack,
    nvfp4_tile,
    quantize_blocks,
    quantize_many,
    quantize_rows,
    update_scales,
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A kernel, the types of its arguments, its constants, and what its code must show."""

    kernel: JITFunction
    types: dict[str, str]  # "*fp8" stands for the target's format
    constants: dict[str, Any]
    num_warps: int
    wide_stores: bool = True  # all of its tensor outputs are written 16 bytes at a time
    fp8_conversions: bool = True  # it rounds to FP8 by the hardware's instruction
    numbers: int = 0  # that each program writes beside tensors and scales

    def compiled(self, target: str, format: str = "e5m2") -> CompiledKernel:
        """Compile for a target of ``ahead_of_time.TARGETS``."""
        fp8 = f"*{fp8_type(target, format)}"
        types = {name: fp8 if type == "*fp8" else type for name, type in self.types.items()}
        constants = dict(self.constants)
        if "HARDWARE" in constants:  # instructions that only Blackwells have
            constants["HARDWARE"] = target in ("cuda:100", "cuda:120")
        return ahead_of_time.compile_for(target, self.kernel, types, constants, num_warps=self.num_warps)


def fp8_type(target: str, format: str) -> str:
    """Triton's name of E4M3 or E5M2 on a target."""
    fnuz = target == "hip:gfx942"
    return {"e4m3": "fp8e4b8" if fnuz else "fp8e4nv", "e5m2": "fp8e5b16" if fnuz else "fp8e5"}[format]


SHAPE = {"rows": "i32", "cols": "i32", "row_stride": "i32"}
PADDED = {**SHAPE, "padded": "i32"}
CONTIGUOUS = {"col_stride": 1}  # the JIT makes a constant of it


def _quantize_many(both: bool = True, check: bool = False) -> Entry:
    types = {"table_ptr": "*i64", "first_tile_ptr": "*i64", "x_like_ptr": "*bf16", "q_like_ptr": "*fp8"}
    blocks = {"BLOCK_R": quantize_many.BLOCK_R, "BLOCK_C": quantize_many.BLOCK_C}
    samples = {"PLACES": quantize_many.PLACES, "WIDTH": quantize_many.WIDTH}
    constants = {"STEPS": 8, "VIA": 0, "ALIGNED": True, "BOTH": both, "LARGEST": 448.0, **blocks, **samples}
    constants |= {"CHECK": check, "RECORD": True}
    kernel = quantize_many.quantize_many_kernel
    return Entry(kernel, types | {"matrices": "i32"}, constants, quantize_many.NUM_WARPS, numbers=1)


def _quantize_blocks(square: bool, **along: Any) -> Entry:
    types = {"x_ptr": "*bf16", "q_ptr": "*fp8", "q_t_ptr": "*fp8", "dequant_ptr": "*fp32", "dequant_t_ptr": "*fp32"}
    constants = {**quantize_blocks.launch_constants(torch.float8_e4m3fn, square, **along), **CONTIGUOUS}
    return Entry(quantize_blocks.quantize_blocks_kernel, types | PADDED, constants, quantize_blocks.NUM_WARPS)


def _quantize_rows(fits: bool) -> Entry:
    types = {"x_ptr": "*bf16", "q_ptr": "*fp8", "dequant_ptr": "*fp32", "cols": "i32", "row_stride": "i32"}
    constants = {"LARGEST": 448.0, "VIA": 0, "FITS": fits, "BLOCK": quantize_rows.LONGEST, **CONTIGUOUS}
    return Entry(quantize_rows.quantize_rows_kernel, types, constants, quantize_rows.ROW_WARPS)


def _row_column_amax() -> Entry:
    types = {"x_ptr": "*bf16", "bits_ptr": "*i32"}
    constants = {**quantize_rows.tile_constants(), **CONTIGUOUS}
    kernel = quantize_rows.row_column_amax_kernel
    return Entry(kernel, types | SHAPE, constants, quantize_rows.TILE_WARPS, False, False)


def _cast_rows_columns() -> Entry:
    types = {"x_ptr": "*bf16", "bits_ptr": "*i32", "q_ptr": "*fp8", "q_t_ptr": "*fp8"}
    types |= {"dequant_ptr": "*fp32", "dequant_t_ptr": "*fp32"}
    constants = {"LARGEST": 448.0, **quantize_rows.tile_constants(), **CONTIGUOUS}
    return Entry(quantize_rows.cast_rows_columns_kernel, types | PADDED, constants, quantize_rows.TILE_WARPS)


def _nvfp4_pack(swizzled: bool) -> Entry:
    types = {"x_ptr": "*bf16", "global_scale_ptr": "*fp32", "codes_ptr": "*u8", "block_scales_ptr": "*fp8e4nv"}
    constants = {"SMALLEST": nvfp4_pack.SMALLEST, "BLOCK": nvfp4_pack.BLOCK, "SIZE": nvfp4_pack.SIZE}
    counts = {"blocks": "i32", "per_row": "i32"}
    constants["SWIZZLED"] = swizzled
    return Entry(nvfp4_pack.nvfp4_pack_kernel, types | counts, constants, nvfp4_pack.NUM_WARPS)


def _quantize_nvfp4(**options: Any) -> Entry:
    types = {"x_ptr": "*bf16", "enc_ptr": "*fp32", "seed_ptr": "*i64", "codes_ptr": "*u8", "scales_ptr": "*u8"}
    types |= dict.fromkeys(("rows", "cols", "row_stride", "numbered"), "i32")
    given: dict[str, Any] = {
        "block": (1, 16),
        "rotated": False,
        "random": False,
        "stream": 0,
        "four_over_six": False,
    } | options
    transpose = given.pop("transpose", False)
    constants = {**nvfp4_tile.constants(1.0, **given), "col_stride": 1, "TRANSPOSE": transpose, "HARDWARE": True}
    return Entry(nvfp4_tile.quantize_nvfp4_kernel, types, constants, nvfp4_tile.NUM_WARPS)


def _nvfp4_matmul(rows: int) -> Entry:
    types = {"x_ptr": "*bf16", "codes_ptr": "*u8", "block_scales_ptr": "*fp8e4nv", "global_scale_ptr": "*fp32"}
    types |= {"bias_ptr": "*bf16", "y_ptr": "*bf16"}
    types |= dict.fromkeys(("rows", "cols", "inner", "per_row", "row_stride"), "i32")
    height, width = nvfp4_matmul.tile(rows)
    blocks = {"BLOCK_M": height, "BLOCK_N": width, "BLOCK_K": nvfp4_matmul.BLOCK_K}
    constants = {"HAS_BIAS": True, "TWICE": nvfp4_matmul.TWICE, **blocks}
    kernel, num_warps = nvfp4_matmul.nvfp4_matmul_kernel, nvfp4_matmul.warps(height)
    return Entry(kernel, types, constants, num_warps, fp8_conversions=False)


def _nvfp4_grad(rows: int) -> Entry:
    types = {"grad_ptr": "*bf16", "codes_ptr": "*u8", "block_scales_ptr": "*fp8e4nv", "global_scale_ptr": "*fp32"}
    types |= {"out_ptr": "*bf16"} | dict.fromkeys(("rows", "inner", "cols", "per_row", "row_stride"), "i32")
    constants = {"TWICE": nvfp4_matmul.TWICE, **_gradient_blocks(rows)}
    return Entry(nvfp4_grad.nvfp4_grad_kernel, types, constants, nvfp4_grad.warps(rows), fp8_conversions=False)


def _fp8_weight_grad(rows: int) -> Entry:
    types = {"grad_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "out_ptr": "*bf16"}
    types |= dict.fromkeys(("rows", "inner", "cols", "row_stride"), "i32")
    kernel, constants = fp8_weight_grad.fp8_weight_grad_kernel, _gradient_blocks(rows)
    return Entry(kernel, types, constants, nvfp4_grad.warps(rows), fp8_conversions=False)


def _gradient_blocks(rows: int) -> dict[str, Any]:
    return {"BLOCK_M": nvfp4_grad.tile(rows), "BLOCK_N": nvfp4_grad.BLOCK_N, "BLOCK_K": nvfp4_grad.WIDTH}


def _update_scales() -> Entry:
    names = ("amaxes_ptr", "history_ptr", "scales_ptr", "counts_ptr", "room_ptr", "known_ptr")
    types = {name: "*i32" if name in ("counts_ptr", "room_ptr") else "*fp32" for name in names} | {"slots": "i32"}
    _, constants = update_scales.launch_arguments(1024, 16, 448.0, "p99", 1)
    constants.pop("slots")
    kernel, num_warps = update_scales.update_scales_kernel, update_scales.NUM_WARPS
    return Entry(kernel, types, constants, num_warps, wide_stores=False, fp8_conversions=False)


CATALOGUE: dict[str, Callable[[], Entry]] = {
    "quantize_many": _quantize_many,
    "quantize_many, one layout": lambda: _quantize_many(both=False),
    "quantize_many, checking": lambda: _quantize_many(check=True),
    "quantize_many, one layout, checking": lambda: _quantize_many(both=False, check=True),
    "quantize_blocks 1x128": lambda: _quantize_blocks(square=False),
    "quantize_blocks 128x128": lambda: _quantize_blocks(square=True),
    "quantize_blocks 128x128, rows alone": lambda: _quantize_blocks(square=True, along_columns=False),
    "quantize_blocks 1x128, columns alone": lambda: _quantize_blocks(square=False, along_rows=False),
    "quantize_rows": lambda: _quantize_rows(fits=True),
    "quantize_rows, long": lambda: _quantize_rows(fits=False),
    "row_column_amax": _row_column_amax,
    "cast_rows_columns": _cast_rows_columns,
    "nvfp4_pack": lambda: _nvfp4_pack(swizzled=False),
    "update_scales": _update_scales,
}

# Kernels that do more than stream a tensor: what holds for the code of the others need not hold for theirs.
PRODUCTS: dict[str, Callable[[], Entry]] = {
    "nvfp4_pack, swizzled": lambda: _nvfp4_pack(swizzled=True),
    "nvfp4_matmul, 1 row": lambda: _nvfp4_matmul(1),
    "nvfp4_matmul, 64 rows": lambda: _nvfp4_matmul(64),
    "nvfp4_grad, 16 rows": lambda: _nvfp4_grad(16),
    "nvfp4_grad, 64 rows": lambda: _nvfp4_grad(64),
    "fp8_weight_grad, 16 rows": lambda: _fp8_weight_grad(16),
    "fp8_weight_grad, 64 rows": lambda: _fp8_weight_grad(64),
}

# Kernels of compute capability 10.0 and newer: they have instructions for E2M1, and no other compiler takes them.
BLACKWELL: dict[str, Callable[[], Entry]] = {
    "quantize_nvfp4 1x16, nearest": lambda: _quantize_nvfp4(),
    "quantize_nvfp4 16x16, transposed, nearest": lambda: _quantize_nvfp4(block=(16, 16), transpose=True),
    "quantize_nvfp4 1x16, rotated, nearest": lambda: _quantize_nvfp4(transpose=True, rotated=True),
    "quantize_nvfp4 1x16, random": lambda: _quantize_nvfp4(random=True),
    "quantize_nvfp4 1x16, rotated, random": lambda: _quantize_nvfp4(transpose=True, rotated=True, random=True),
    "quantize_nvfp4 1x16, four over six": lambda: _quantize_nvfp4(four_over_six=True),
    "quantize_nvfp4 16x16, transposed, four over six": lambda: _quantize_nvfp4(
        block=(16, 16), transpose=True, four_over_six=True
    ),
}
