"""The MXFP8 gemm of NVIDIA's own library, as an operation of a graph: ``cublaslt_mm.py`` with scales per 32 values.

    y = left @ right + bias + added        of dequantized operands, see kernels/mx_swizzled.py

left: [M, K], right: [K, N] e4m3; scale_left, scale_right: flat uint8, swizzled; bias: [N]; added: [M, N] -> y: [M, N]
in ``out_dtype``, which is that of ``added``. Only the result is rounded. Either dimension of an operand may be
contiguous on compute capability 10.x, K elsewhere. K is a multiple of 32, M and N of 16.

A machine whose cuBLASLt can't be called directly goes through ``torch._scaled_mm``, with copies where K is not
contiguous, and says so once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fp8_compile.kernels.define_op import define
from fp8_compile.kernels.mx_swizzled import quantize_mx_swizzled, swizzled_mx_mm
from fp8_compile.kernels.operands import FLOATS, check_value
from fp8_compile.kernels.operands import check as check_operand

from .cublaslt import CublasLtError
from .cublaslt_mm import Library, _warn, library_of

PROBE_SIZE = 128


class Operands(NamedTuple):
    """What the operation takes, in the order in which it takes them."""

    left: Tensor
    right: Tensor
    scale_left: Tensor
    scale_right: Tensor
    added: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype


def reference(given: Operands) -> Tensor:
    """The formula above in plain PyTorch."""
    return swizzled_mx_mm(*given)


def by_cublaslt(library: Library, given: Operands, y: Tensor) -> None:
    """The formula with cuBLASLt, on the current stream."""
    if y.numel():
        library.multiply(
            *(given.left, given.right, given.scale_left, given.scale_right, given.bias, given.added, y),
            fast_accumulation=False,
            stream=torch._C._cuda_getCurrentRawStream(y.device.index) if y.is_cuda else 0,
        )


def by_torch(given: Operands, y: Tensor) -> None:
    """The formula with torch's own gemm: copies with K contiguous where they are not, a result that is rounded before
    the addition."""
    left = given.left if given.left.stride(1) == 1 else given.left.contiguous()
    right = given.right if given.right.stride(0) == 1 else given.right.t().contiguous().t()
    scale_left, scale_right = (scale.view(torch.float8_e8m0fnu) for scale in (given.scale_left, given.scale_right))
    torch._scaled_mm(left, right, scale_left, scale_right, bias=given.bias, out_dtype=y.dtype, out=y)
    if given.added is not None:
        y.add_(given.added)


@functools.cache
def mx_library_of(device: int) -> Library | None:
    """cuBLASLt on a device, once a small gemm there gave what the formula gives; a warning says why not."""
    library = library_of(device)
    if library is None:
        return None
    try:
        any_layout = torch.cuda.get_device_capability(device)[0] == 10
        check(library, torch.device("cuda", device), any_layout=any_layout)
        return library
    except CublasLtError as error:
        _warn(f"cuda:{device}, MXFP8", error)
        return None


def check(library: Library, device: torch.device, *, any_layout: bool = False) -> None:
    """Compute small gemms whose numbers are exact in bf16, with ``any_layout`` of all four kinds; ``CublasLtError`` if
    one of them is wrong. The scales differ from block to block, so that a wrong order of them is noticed."""
    numbers = torch.arange(PROBE_SIZE * PROBE_SIZE, device=device).view(PROBE_SIZE, PROBE_SIZE)
    blocks = numbers // PROBE_SIZE // 32 + numbers % PROBE_SIZE // 32
    left, right = ((numbers % prime == 0).float() * (blocks % 3 + 1).exp2() for prime in (7, 5))
    added = (numbers % 11).to(torch.bfloat16)
    flips = [(False, True), *([(False, False), (True, False), (True, True)] if any_layout else [])]
    for flip_left, flip_right in flips:
        q_left, *scales_left = quantize_mx_swizzled(left, (32, 1) if flip_left else (1, 32))
        q_right, *scales_right = quantize_mx_swizzled(right, (1, 32) if flip_right else (32, 1))
        given = Operands(
            q_left.t() if flip_left else q_left,
            q_right.t() if flip_right else q_right,
            scales_left[flip_left],
            scales_right[not flip_right],
            added,
            None,
            torch.bfloat16,
        )
        got, expected = torch.empty_like(added), reference(given)
        by_cublaslt(library, given, got)
        if not torch.equal(got, expected):
            raise CublasLtError("the result of a small MXFP8 gemm was wrong")


def _checked(*arguments: Any, **options: Any) -> Tensor:
    given = Operands(*arguments, **options)
    name = "cublaslt_mx_mm"
    check_operand(name, "left", given.left, (torch.float8_e4m3fn,), (given.left.shape[0], given.right.shape[0]))
    check_operand(name, "right", given.right, (torch.float8_e4m3fn,), given.right.shape)
    if given.bias is not None:
        check_operand(name, "bias", given.bias, FLOATS, (given.right.shape[1],))
    check_value(name, "out_dtype", given.out_dtype, FLOATS)
    return reference(given)


def _plain_out(*arguments: Any, out: Tensor, **options: Any) -> Tensor:
    return out.copy_(reference(Operands(*arguments, **options)))


def _multiply(*arguments: Any, **options: Any) -> Tensor:
    return _multiply_out(*arguments, **options, out=_new(*arguments, **options))


def _multiply_out(*arguments: Any, out: Tensor, **options: Any) -> Tensor:
    given = Operands(*arguments, **options)
    library = mx_library_of(out.device.index)
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
    "ScalarType out_dtype"
)
cublaslt_mx_mm_op = define(f"cublaslt_mx_mm({_ARGUMENTS}) -> Tensor", _checked, _new, cuda=_multiply)
cublaslt_mx_mm_out_op = define(
    f"cublaslt_mx_mm.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)", _plain_out, None, cuda=_multiply_out
)


@register_flop_formula(torch.ops.fp8_compile.cublaslt_mx_mm)
def _flops(left: Any, right: Any, *others: Any, out_shape: Any = None, **options: Any) -> int:
    """The partitioner weighs by it what to compute again; ``left`` and ``right`` are sizes."""
    return 2 * left[0] * left[1] * right[1]
