"""The FP8 gemm of NVIDIA's own library, as an operation of a graph: it adds a matrix to its product, and reads operands
in any layout on GPUs that can (compute capability 10.x).

    y = left @ right * scale_left * scale_right + bias + added

left: [M, K], right: [K, N] fp8; scale_left, scale_right: one fp32 each; bias: [N]; added: [M, N] -> y: [M, N] in
``out_dtype``, which is that of ``added``. Only the result is rounded.

A residual, or the sum of the gradients of a tensor that several layers read, costs a pass over memory where it is an
addition of its own: the product is written, read back, and the sum written. cuBLASLt reads ``added`` while it writes.
``torch._scaled_mm`` has no argument for it, and insists on operands with K contiguous while it is traced.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fp8_compile.kernels.define_op import define
from fp8_compile.kernels.scaled_mm import scaled_mm

from .cublaslt import CublasLt, CublasLtError
from .cublaslt_compiled import CompiledCublasLt, fastest

PROBE_SIZE = 64

Library = CublasLt | CompiledCublasLt


class Operands(NamedTuple):
    """What the operation takes, in the order in which it takes them."""

    left: Tensor
    right: Tensor
    scale_left: Tensor
    scale_right: Tensor
    added: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype
    fast_accumulation: bool = False


def reference(given: Operands) -> Tensor:
    """The formula above in plain PyTorch."""
    scales = (given.scale_left.view(1, 1), given.scale_right.view(1, 1))
    product = scaled_mm(given.left, given.right, *scales, given.bias, torch.float32)
    return (product if given.added is None else product + given.added).to(given.out_dtype)


def by_cublaslt(library: Library, given: Operands, y: Tensor) -> None:
    """The formula with cuBLASLt, on the current stream."""
    if y.numel():
        library.multiply(
            *(given.left, given.right, given.scale_left, given.scale_right, given.bias, given.added, y),
            fast_accumulation=given.fast_accumulation,
            stream=torch._C._cuda_getCurrentRawStream(y.device.index) if y.is_cuda else 0,
        )


def by_torch(given: Operands, y: Tensor) -> None:
    """The formula with torch's own gemm: copies with K contiguous where they are not, a result that is rounded before
    the addition."""
    left = given.left if given.left.stride(1) == 1 else given.left.contiguous()
    right = given.right if given.right.stride(0) == 1 else given.right.t().contiguous().t()
    torch._scaled_mm(
        *(left, right, given.scale_left.view(1, 1), given.scale_right.view(1, 1)),
        bias=given.bias,
        out_dtype=y.dtype,
        use_fast_accum=given.fast_accumulation,
        out=y,
    )
    if given.added is not None:
        y.add_(given.added)


@functools.cache
def library_of(device: int) -> Library | None:
    """cuBLASLt on a device, once a small gemm there gave what torch's own gives; a warning says why not."""
    try:
        library = fastest(ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}"))
        any_layout = torch.cuda.get_device_capability(device)[0] == 10
        check(library, torch.device("cuda", device), any_layout=any_layout)
        return library
    except (OSError, CublasLtError) as error:
        _warn(f"cuda:{device}", error)
        return None


def _warn(where: str, error: Exception) -> None:
    warnings.warn(
        f"{where}: FP8 gemms copy operands and add residuals in steps of their own, which costs passes over memory, "
        f"because cuBLASLt could not be used directly: {error}",
        stacklevel=2,
    )


def check(library: Library, device: torch.device, *, any_layout: bool = False) -> None:
    """Compute small gemms whose numbers are exact in bf16, with ``any_layout`` of all four kinds; ``CublasLtError`` if
    one of them is wrong."""
    numbers = torch.arange(PROBE_SIZE * PROBE_SIZE, device=device).view(PROBE_SIZE, PROBE_SIZE)
    left, right = ((numbers % prime == 0).to(torch.float8_e4m3fn) for prime in (7, 5))
    scales = (torch.tensor(0.5, device=device), torch.tensor(2.0, device=device))
    added = (numbers % 11).to(torch.bfloat16)
    pairs = [(left, right.t()), *([(left, right), (left.t(), right), (left.t(), right.t())] if any_layout else [])]
    for pair in pairs:
        given = Operands(*pair, *scales, added, None, torch.bfloat16)
        got, expected = torch.empty_like(added), reference(given)
        by_cublaslt(library, given, got)
        if not torch.equal(got, expected):
            raise CublasLtError("the result of a small gemm was wrong")


def _plain(*arguments: Any, **options: Any) -> Tensor:
    return reference(Operands(*arguments, **options))


def _plain_out(*arguments: Any, out: Tensor, **options: Any) -> Tensor:
    return out.copy_(reference(Operands(*arguments, **options)))


def _multiply(*arguments: Any, **options: Any) -> Tensor:
    return _multiply_out(*arguments, **options, out=_new(*arguments, **options))


def _multiply_out(*arguments: Any, out: Tensor, **options: Any) -> Tensor:
    given = Operands(*arguments, **options)
    library = library_of(out.device.index)
    if library is not None:
        try:
            by_cublaslt(library, given, out)
            return out
        except CublasLtError as error:  # a shape that it has no kernel for
            _warn(str(tuple(out.shape)), error)
    by_torch(given, out)
    return out


def _new(*arguments: Any, **options: Any) -> Tensor:
    given = Operands(*arguments, **options)
    return given.left.new_empty((given.left.shape[0], given.right.shape[1]), dtype=given.out_dtype)


_ARGUMENTS = (
    "Tensor left, Tensor right, Tensor scale_left, Tensor scale_right, Tensor? added, Tensor? bias, "
    "ScalarType out_dtype, bool fast_accumulation=False"
)
cublaslt_mm_op = define(f"cublaslt_mm({_ARGUMENTS}) -> Tensor", _plain, _new, cuda=_multiply)
cublaslt_mm_out_op = define(
    f"cublaslt_mm.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)", _plain_out, None, cuda=_multiply_out
)


@register_flop_formula(torch.ops.fp8_compile.cublaslt_mm)
def _flops(left: Any, right: Any, *others: Any, out_shape: Any = None, **options: Any) -> int:
    """The partitioner weighs by it what to compute again; ``left`` and ``right`` are sizes."""
    return 2 * left[0] * left[1] * right[1]
