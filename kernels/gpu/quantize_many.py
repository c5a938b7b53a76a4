"""Quantize many matrices by known scales, into both layouts or one, and record their amaxes: all in one launch.

    q    = fp8(clamp(x * quant_scale, -F, F) + 0 * x)      F: the largest value of the format
    q_t  = transpose(q)
    amax = max(amax, max |x|)                              -1 before anything was recorded; NaN wins over Inf

For each matrix: x: [R, C] fp32/bf16/fp16 row-major; quant_scale, amax: one fp32 each; q: [R, C], q_t: [C, R] fp8
row-major, written in place, q_t only where the gemms want it. ``via``: x is rounded to that dtype first, as autocast
does before a matmul.

``0 * x`` makes Inf a NaN: the saturating cast alone would turn it into F and hide an overflow from a loss scaler.

One launch for the weights of a model after an optimizer step: a table of addresses says where they are. Matrices that
differ in device, dtype, ``via``, layouts, or in whether they can be moved 16 bytes at a time are a launch each.

Each launch stores the fingerprints of the matrices (``kernels/fingerprint.py``). One with ``check`` quantizes only the
matrices that no longer have the stored one; the host need not know which. Where nothing has changed, a program reads
the sample and returns. The fingerprint of a matrix is stored once for each of its tiles, so that a program reads and
writes its own alone: a single one would be overwritten before programs that start late have compared theirs with it.
(Two buffers that take turns would do as well, but not in a CUDA graph, which reads the same one at every replay.)
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_compile.kernels.delayed_scaling import cast_delayed
from fp8_compile.kernels.fingerprint import PLACES, WIDTH
from fp8_compile.kernels.formats import format_of

from .fingerprint import sampled_fingerprint
from .launch import Launch
from .tile import VIA, largest_magnitude, loaded, magnitude_bits, record_amax, saturated

# 64 x 64: a thread of four warps holds 32 elements, two 16-byte stores of each layout, and the rows of both outputs are
# written in pieces of 64 bytes, two whole sectors of an NVIDIA cache line.
BLOCK_R, BLOCK_C, NUM_WARPS = 64, 64, 4
ALIGNMENT = 16  # bytes of a vector, and so the multiple that addresses and both sizes must be of


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One matrix and where its results go."""

    x: Tensor
    q: Tensor
    q_t: Tensor | None
    quant_scale: Tensor  # one element
    amax: Tensor  # one element
    fingerprints: Tensor  # int64, one for each tile; see new_fingerprints()
    via: torch.dtype | None = None

    @property
    def aligned(self) -> bool:
        addresses = (_address(tensor) for tensor in (self.x, self.q, self.q_t))
        return all(number % ALIGNMENT == 0 for number in (*addresses, *self.x.shape))


@triton.jit
def quantize_many_kernel(
    table_ptr,
    first_tile_ptr,
    x_like_ptr,
    q_like_ptr,
    matrices,
    STEPS: tl.constexpr,
    VIA: tl.constexpr,  # 0: quantized as it is; 1: rounded to bf16 before, 2: to fp16
    ALIGNED: tl.constexpr,
    BOTH: tl.constexpr,  # layouts
    CHECK: tl.constexpr,  # quantize only matrices whose fingerprint has changed
    RECORD: tl.constexpr,  # the amax
    LARGEST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One tile for each program, those of a matrix one after the other; a row of the table: x, q, q_t, quant_scale,
    amax, fingerprints, rows, cols. ``*_like_ptr`` are there for their types."""
    program = tl.program_id(0).to(tl.int64)
    low, high = tl.zeros([], tl.int32), matrices + tl.zeros([], tl.int32)
    for _ in tl.static_range(STEPS):  # the matrix whose first tile is the last one not after this program
        middle = (low + high) // 2
        after = tl.load(first_tile_ptr + middle) > program
        low, high = tl.where(after, low, middle), tl.where(after, middle, high)
    row = table_ptr + low.to(tl.int64) * 8
    x_ptr = tl.load(row).to(x_like_ptr.dtype)
    q_bytes = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    q_t_bytes = tl.load(row + 2).to(tl.pointer_type(tl.uint8))
    rows, cols = tl.load(row + 6), tl.load(row + 7)
    if ALIGNED:
        x_ptr, q_bytes = tl.multiple_of(x_ptr, 16), tl.multiple_of(q_bytes, 16)
        q_t_bytes = tl.multiple_of(q_t_bytes, 16)
        rows, cols = tl.multiple_of(rows, 16), tl.multiple_of(cols, 16)

    tile = program - tl.load(first_tile_ptr + low)
    fingerprint_ptr = tl.load(row + 5).to(tl.pointer_type(tl.int64)) + tile
    fingerprint = sampled_fingerprint(x_ptr, rows * cols, PLACES, WIDTH)
    if CHECK:
        if tl.load(fingerprint_ptr) == fingerprint:
            return
        # Each warp reads for itself what it compares with: all have read before any writes (triton#1615).
        tl.debug_barrier()
    tl.store(fingerprint_ptr, fingerprint)

    tiles_across = tl.maximum(tl.cdiv(cols, BLOCK_C), 1)  # 1: an empty matrix has one program, which records 0
    r = (tile // tiles_across) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (tile % tiles_across) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    x = loaded(tl.load(x_ptr + (r[:, None] * cols + c[None, :]), mask=inside, other=0.0), VIA)
    if RECORD:
        record_amax(tl.load(row + 4).to(tl.pointer_type(tl.float32)), magnitude_bits(x))

    quant_scale = tl.load(tl.load(row + 3).to(tl.pointer_type(tl.float32)))
    q = (saturated(x, quant_scale, LARGEST) + 0.0 * x).to(q_like_ptr.dtype.element_ty)
    # Through an integer view: Triton may miscompile transposed FP8 stores (triton#11111, seen as rare NaNs). It can go
    # when that issue is closed in every Triton we allow.
    codes = q.to(tl.uint8, bitcast=True)
    tl.store(q_bytes + (r[:, None] * cols + c[None, :]), codes, mask=inside)
    if BOTH:
        inside_t = (c < cols)[:, None] & (r < rows)[None, :]
        tl.store(q_t_bytes + (c[:, None] * rows + r[None, :]), tl.trans(codes), mask=inside_t)


def tiles(rows: int, cols: int) -> int:
    """Programs to launch for a matrix; at least one, so that an empty matrix records an amax of 0."""
    return max(1, triton.cdiv(rows, BLOCK_R) * triton.cdiv(cols, BLOCK_C))


class QuantizeMany:
    """The launches for some matrices; the tables are made once and hold as long as no tensor moves."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        for one in matrices:
            _check(one)
        kinds: dict[Any, list[Matrix]] = {}
        for one in matrices:
            kind = (one.x.device, one.x.dtype, one.q.dtype, one.via, one.aligned, one.q_t is None)
            kinds.setdefault(kind, []).append(one)
        self.launches = [_Launch(group) for group in kinds.values()]
        self.addresses = addresses(matrices)

    def __call__(self, *, check: bool = False, record: bool = True) -> None:
        """``check``: quantize only the matrices whose fingerprint is not the one that the last launch stored.
        ``record``: the amaxes of what is quantized."""
        for launch in self.launches:
            launch(check, record)


class _Launch:
    """The matrices of one kind."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        first = matrices[0]
        counts = [tiles(*one.x.shape) for one in matrices]
        self.kept = matrices  # the tables are numbers: something must keep the tensors
        device = first.x.device
        table = [[*found, *one.x.shape] for found, one in zip(addresses(matrices), matrices)]
        self.table = torch.tensor(table, dtype=torch.int64, device=device)
        self.first_tile = torch.tensor([0, *itertools.accumulate(counts)][:-1], dtype=torch.int64, device=device)
        # The arguments of the kernel, but for CHECK and RECORD between these two.
        steps, both = (len(matrices) - 1).bit_length(), first.q_t is not None
        self._before = (
            *(self.table, self.first_tile, first.x, first.q, len(matrices)),
            *(steps, VIA[first.via], first.aligned, both),
        )
        self._after = (format_of(first.q.dtype).max, BLOCK_R, BLOCK_C, PLACES, WIDTH)
        grid = (sum(counts), 1, 1)
        self._launches = {how: Launch(grid, NUM_WARPS) for how in itertools.product((False, True), repeat=2)}

    def __call__(self, check: bool, record: bool) -> None:
        launch = self._launches[check, record]
        with torch.cuda.device_of(self.table):  # Triton launches on the current device, wherever the tensors are
            launch(quantize_many_kernel, *self._before, check, record, *self._after)


def launches_for(matrices: Sequence[Matrix], before: QuantizeMany | None) -> QuantizeMany:
    """``before``, if it was made for tensors at the same addresses: tables of new ones are copied to the device, which
    waits for all that the device has to do."""
    return before if before is not None and before.addresses == addresses(matrices) else QuantizeMany(matrices)


def addresses(matrices: Sequence[Matrix]) -> list[tuple[int, ...]]:
    """Where the tensors are: a table made for other addresses must not be used."""
    return [
        tuple(map(_address, (one.x, one.q, one.q_t, one.quant_scale, one.amax, one.fingerprints))) for one in matrices
    ]


def new_fingerprints(x: Tensor) -> Tensor:
    """Room for those of a matrix, before its first launch."""
    return torch.zeros(tiles(*x.shape), dtype=torch.int64, device=x.device)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def reference(matrix: Matrix) -> tuple[Tensor, Tensor, Tensor]:
    """q, q_t and max |x| in plain PyTorch."""
    x = matrix.x if matrix.via is None else matrix.x.to(matrix.via)
    dtype = matrix.q.dtype
    q = cast_delayed(x, matrix.quant_scale, dtype)
    return q, q.view(torch.uint8).t().contiguous().view(dtype), largest_magnitude(x)


def _check(matrix: Matrix) -> None:
    tensors = [matrix.x, matrix.q, *([] if matrix.q_t is None else [matrix.q_t])]
    shapes = [matrix.q.shape, *(turned.t().shape for turned in tensors[2:])]
    if any(shape != matrix.x.shape for shape in shapes) or not all(tensor.is_contiguous() for tensor in tensors):
        found = ", ".join(f"{tuple(tensor.shape)} with strides {tensor.stride()}" for tensor in tensors)
        raise ValueError(f"quantize_many expects contiguous x [R, C], q [R, C] and q_t [C, R], got {found}")
