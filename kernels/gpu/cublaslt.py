"""FP8 gemms of cuBLASLt as ``torch._scaled_mm`` can't ask for them: with a matrix to add, with operands in any layout.

    d = left @ right * scale_left * scale_right + bias + c

The scales are one number of FP32 each; where they are bytes, powers of two for each 32 values along K (MXFP8); where
they are E4M3, one for each 16 (NVFP4): both in the order of ``kernels/mx_swizzled.py``, on compute capability 10.x and
12.x. Operands of NVFP4 are bytes of two codes, K contiguous, and the product is multiplied by ``alpha``, a number of
FP32 in the GPU's memory.

left: [M, K], right: [K, N] fp8, either dimension contiguous where the GPU can read it so (compute capability 10.x; K
elsewhere); c, d: [M, N] bf16/fp16/fp32 with contiguous rows, c optional.

cuBLASLt counts columns first. What it is asked for is therefore the transposed product, d^T = right^T @ left^T + c^T: a
matrix that is stored row by row is, to cuBLASLt, its own transpose.

This is the way that needs no compiler: each function of the library is called from Python. ``cublaslt_compiled.py``
does the same in one call, in half the time (``benchmarks/host_time_gpu.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import threading
from typing import Any, Hashable, NamedTuple

import torch
from torch import Tensor

# The constants of library_types.h, cublas_api.h and cublasLt.h (13.8; the numbers are part of the library's ABI).
DATA_TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
    torch.uint8: 33,  # two codes of E2M1
}
COMPUTE_32F = 68
OP_N, OP_T = 0, 1
EPILOGUE_BIAS = 4
DESC_POINTER_MODE, DESC_TRANSA, DESC_TRANSB, DESC_EPILOGUE, DESC_BIAS_POINTER = 2, 3, 4, 7, 8
DESC_BIAS_DATA_TYPE = 26
DESC_A_SCALE_POINTER, DESC_B_SCALE_POINTER, DESC_FAST_ACCUM = 17, 18, 25
DESC_A_SCALE_MODE, DESC_B_SCALE_MODE = 31, 32
SCALE_VEC16_UE4M3, SCALE_VEC32_UE8M0 = 1, 2  # a byte for each 16 or 32 values along K; else one number
SCALE_MODES = {torch.float32: 0, torch.float8_e4m3fn: SCALE_VEC16_UE4M3, torch.uint8: SCALE_VEC32_UE8M0}
POINTERS_ON_DEVICE = 1  # alpha and beta
PREF_MAX_WORKSPACE_BYTES, PREF_MIN_ALIGNMENT = 1, (5, 6, 7, 8)  # of A, B, C, D

WORKSPACE_BYTES = 32 << 20  # at most: what NVIDIA advises on Hopper and newer
LEAST_WORKSPACE_BYTES = 256  # for an algorithm that needs none
MOST_ALIGNMENT = 256  # bytes; more makes no difference to the choice of a kernel
MOST_PLANS = 1024  # that are remembered: a few for each layer of a model, some KB each


_Vectors = tuple[Tensor, Tensor, Tensor | None]  # the scales of A and B, the bias


class CublasLtError(RuntimeError):
    """A call that cuBLASLt refused."""


class Gemm(NamedTuple):
    """The formula of this file with its operands. The result is written to ``d``, which may be ``c``."""

    left: Tensor
    right: Tensor
    scale_left: Tensor
    scale_right: Tensor
    bias: Tensor | None
    c: Tensor | None
    d: Tensor
    fast_accumulation: bool = False
    alpha: Tensor | None = None

    def __str__(self) -> str:
        (m, k), n = self.left.shape, self.right.shape[1]
        return (
            f"{m}x{n}x{k * in_a_byte(self.left.dtype)}, {self.left.dtype} by {self.right.dtype} to {self.d.dtype}, "
            f"strides {tuple(self.left.stride())} and {tuple(self.right.stride())}"
        )

    @property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A, B, C and D as cuBLASLt sees them."""
        return self.right, self.left, self.d if self.c is None else self.c, self.d

    @property
    def vectors(self) -> _Vectors:
        return self.scale_right, self.scale_left, self.bias


def no_kernel(gemm: Gemm) -> CublasLtError:
    """The error for a gemm that cuBLASLt knows no algorithm for."""
    return CublasLtError(f"cuBLASLt has no kernel for {gemm}")


class _HeuristicResult(ctypes.Structure):
    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


def in_a_byte(dtype: torch.dtype) -> int:
    """How many elements a tensor's element stands for: two of E2M1."""
    return 2 if dtype is torch.uint8 else 1


@functools.cache
def betas(device: torch.device) -> Tensor:
    """0 and 1 where a gemm reads them whose alpha is in the GPU's memory."""
    return torch.tensor([0.0, 1.0], device=device)


@dataclasses.dataclass
class _Plan:
    """Everything about a gemm but its addresses."""

    description: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ...]  # of A, B, C and D
    chosen: _HeuristicResult
    made: contextlib.ExitStack  # gives the library's objects back


class CublasLt:
    """One handle of the library. Threads wait for each other: a description is filled in, then used."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._lock = library, threading.Lock()
        self._plans: dict[Hashable, _Plan | str] = {}  # by last use; or why there is none
        self._handle = ctypes.c_void_p()
        self._zero, self._one = ctypes.c_float(0.0), ctypes.c_float(1.0)
        self._call("cublasLtCreate", ctypes.byref(self._handle))

    def multiply(self, gemm: Gemm, *, stream: int) -> None:
        """Compute a gemm."""
        bias, added, device = gemm.bias, gemm.c is not None, gemm.d.device
        key = (
            *((one.shape, one.stride(), one.dtype, _alignment(one)) for one in gemm.matrices),
            None if bias is None else (bias.dtype, _alignment(bias)),
            gemm.fast_accumulation,
            gemm.scale_left.dtype,
            gemm.alpha is None,
        )
        with self._lock:
            plan = self._known(key, gemm)
            size = max(plan.chosen.workspace_size, LEAST_WORKSPACE_BYTES)
            workspace = torch.empty(size, dtype=torch.uint8, device=device)
            self._point_to(plan.description, gemm.vectors)
            a, b, c_, d_ = (ctypes.c_void_p(one.data_ptr()) for one in gemm.matrices)
            layout_a, layout_b, layout_c, layout_d = plan.layouts
            one: Any = ctypes.byref(self._one)
            beta: Any = ctypes.byref(self._one if added else self._zero)
            if gemm.alpha is not None:
                one, beta = (ctypes.c_void_p(n.data_ptr()) for n in (gemm.alpha, betas(device)[int(added)]))
            self._call(
                "cublasLtMatmul",
                *(self._handle, plan.description, one, a, layout_a, b, layout_b),
                *(beta, c_, layout_c, d_, layout_d),
                ctypes.byref(plan.chosen.algo),
                *(ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(size), ctypes.c_void_p(stream)),
            )

    def _known(self, key: Hashable, gemm: Gemm) -> _Plan:
        """The plan for a shape, made once. Where sizes vary from step to step, no more than MOST_PLANS are kept."""
        plan = self._plans.pop(key, None)
        if plan is None:
            try:
                plan = self._plan(gemm)
            except CublasLtError as error:  # asking again would take as long, each time
                plan = str(error)
        self._plans[key] = plan
        if len(self._plans) > MOST_PLANS:
            oldest = self._plans.pop(next(iter(self._plans)))
            if isinstance(oldest, _Plan):
                oldest.made.close()
        if isinstance(plan, str):
            raise CublasLtError(plan)
        return plan

    def _plan(self, gemm: Gemm) -> _Plan:
        (right, left, c, d), bias = gemm.matrices, gemm.bias
        with contextlib.ExitStack() as made:
            description = self._make(made, "MatmulDesc", COMPUTE_32F, DATA_TYPES[torch.float32])
            right_by_k, left_by_k = right.stride(0) == 1, left.stride(1) == 1
            self._describe(description, DESC_TRANSA, ctypes.c_int32(OP_T if right_by_k else OP_N))
            self._describe(description, DESC_TRANSB, ctypes.c_int32(OP_N if left_by_k else OP_T))
            self._describe(description, DESC_FAST_ACCUM, ctypes.c_int8(gemm.fast_accumulation))
            if gemm.alpha is not None:
                self._describe(description, DESC_POINTER_MODE, ctypes.c_int32(POINTERS_ON_DEVICE))
            if mode := SCALE_MODES[gemm.scale_left.dtype]:
                for attribute in (DESC_A_SCALE_MODE, DESC_B_SCALE_MODE):
                    self._describe(description, attribute, ctypes.c_int32(mode))
            if bias is not None:
                self._describe(description, DESC_EPILOGUE, ctypes.c_int32(EPILOGUE_BIAS))
                self._describe(description, DESC_BIAS_DATA_TYPE, ctypes.c_int32(DATA_TYPES[bias.dtype]))
            self._point_to(description, gemm.vectors)
            as_rows = (right.t() if right_by_k else right, left if left_by_k else left.t(), c, d)
            layouts = tuple(self._layout(made, one) for one in as_rows)
            chosen = self._choose(description, layouts, gemm)
            return _Plan(description, layouts, chosen, made.pop_all())

    def _choose(
        self, description: ctypes.c_void_p, layouts: tuple[ctypes.c_void_p, ...], gemm: Gemm
    ) -> _HeuristicResult:
        """The algorithm that the library thinks best."""
        chosen, found = _HeuristicResult(), ctypes.c_int()
        with contextlib.ExitStack() as made:
            preference = self._make(made, "MatmulPreference")
            limits: list[tuple[int, Any]] = [(PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(WORKSPACE_BYTES))]
            limits += [(name, ctypes.c_uint32(_alignment(one))) for name, one in zip(PREF_MIN_ALIGNMENT, gemm.matrices)]
            for name, limit in limits:
                size = ctypes.c_size_t(ctypes.sizeof(limit))
                self._call("cublasLtMatmulPreferenceSetAttribute", preference, name, ctypes.byref(limit), size)
            self._call(
                "cublasLtMatmulAlgoGetHeuristic",
                *(self._handle, description, *layouts, preference, 1, ctypes.byref(chosen), ctypes.byref(found)),
            )
        if not found.value or chosen.state:
            raise no_kernel(gemm)
        return chosen

    def _make(self, made: contextlib.ExitStack, kind: str, *arguments: Any) -> ctypes.c_void_p:
        """An object of the library's, which ``made`` gives back."""
        one = ctypes.c_void_p()
        self._call(f"cublasLt{kind}Create", ctypes.byref(one), *arguments)
        made.callback(self._call, f"cublasLt{kind}Destroy", one)
        return one

    def _layout(self, made: contextlib.ExitStack, rows_contiguous: Tensor) -> ctypes.c_void_p:
        """A matrix [R, C] that is stored row by row is one of C rows and R columns to cuBLASLt."""
        (rows, cols), each = rows_contiguous.shape, in_a_byte(rows_contiguous.dtype)
        sizes = (ctypes.c_uint64(each * cols), ctypes.c_uint64(rows), ctypes.c_int64(each * rows_contiguous.stride(0)))
        return self._make(made, "MatrixLayout", DATA_TYPES[rows_contiguous.dtype], *sizes)

    def _point_to(self, description: ctypes.c_void_p, vectors: _Vectors) -> None:
        for attribute, vector in zip((DESC_A_SCALE_POINTER, DESC_B_SCALE_POINTER, DESC_BIAS_POINTER), vectors):
            if vector is not None:
                self._describe(description, attribute, ctypes.c_void_p(vector.data_ptr()))

    def _describe(self, description: ctypes.c_void_p, attribute: int, setting: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(setting))
        self._call("cublasLtMatmulDescSetAttribute", description, attribute, ctypes.byref(setting), size)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise CublasLtError(f"{name} failed with status {status} (cublasStatus_t)")


def _alignment(tensor: Tensor) -> int:
    """The largest power of two that divides a tensor's address."""
    address = tensor.data_ptr()
    return min(address & -address, MOST_ALIGNMENT) if address else MOST_ALIGNMENT
