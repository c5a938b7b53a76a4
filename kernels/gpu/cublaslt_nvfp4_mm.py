"""The NVFP4 gemm of NVIDIA's own library, as an operation of a graph: ``cublaslt_mx_mm.py`` for 4-bit operands.

    y = alpha * left @ right^T + bias + added        of codes times block scales, see kernels/nvfp4_swizzled.py

left: [M, K/2], right: [N, K/2] uint8, contiguous; scale_left, scale_right: flat e4m3, swizzled; alpha: one fp32, the
product of both tensors' scales; bias: [N]; added: [M, N] -> y: [M, N] in ``out_dtype``, which is that of ``added``.
Only the result is rounded. K, M and N are multiples of 32.

The scales of the tensors are known to the GPU alone, and cuBLASLt reads their product from its memory.
``torch._scaled_mm`` has no argument for it: where cuBLASLt can't be called directly, the result is multiplied in a pass
of its own, after a warning.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fp8_compile.kernels.define_op import define
from fp8_compile.kernels.nvfp4_swizzled import quantize_nvfp4_swizzled, swizzled_nvfp4_mm
from fp8_compile.kernels.operands import FLOATS, FP32, check_value
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
    alpha: Tensor
    added: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype


def reference(given: Operands) -> Tensor:
    """The formula above in plain PyTorch."""
    return swizzled_nvfp4_mm(*given)


def by_cublaslt(library: Library, given: Operands, y: Tensor) -> None:
    """The formula with cuBLASLt, on the current stream."""
    if y.numel():
        library.multiply(
            *(given.left, given.right.t(), given.scale_left, given.scale_right, given.bias, given.added, y),
            fast_accumulation=False,
            stream=torch._C._cuda_getCurrentRawStream(y.device.index) if y.is_cuda else 0,
            alpha=given.alpha,
        )


def by_torch(given: Operands, y: Tensor) -> None:
    """The formula with torch's own gemm, whose result is multiplied and added to in passes of their own."""
    codes = (given.left.view(torch.float4_e2m1fn_x2), given.right.view(torch.float4_e2m1fn_x2).t())
    product = torch._scaled_mm(*codes, given.scale_left, given.scale_right, out_dtype=torch.float32)
    product.mul_(given.alpha.reshape(()))
    for one in (given.bias, given.added):
        if one is not None:
            product.add_(one)
    y.copy_(product)


@functools.cache
def nvfp4_library_of(device: int) -> Library | None:
    """cuBLASLt on a device, once small gemms there gave what the formula gives; a warning says why not."""
    library = library_of(device)
    if library is None:
        return None
    try:
        check(library, torch.device("cuda", device))
        return library
    except CublasLtError as error:
        _warn(f"cuda:{device}, NVFP4", error)
        return None


def check(library: Library, device: torch.device) -> None:
    """Compute small gemms whose numbers are exact in bf16, with and without an addition; ``CublasLtError`` if one of
    them is wrong. The scales differ from block to block, so that a wrong order of them is noticed."""
    numbers = torch.arange(PROBE_SIZE * PROBE_SIZE, device=device).view(PROBE_SIZE, PROBE_SIZE)
    blocks = numbers // PROBE_SIZE // 32 + numbers % PROBE_SIZE // 16
    one = torch.ones(1, 1, device=device)
    options = (1.0, (1, 16), False, False, None, 0, False, PROBE_SIZE)
    sides = [(numbers % prime == 0).float() * 6 * (blocks % 3 + 1).exp2() for prime in (7, 5)]
    (left, scale_left), (right, scale_right) = (quantize_nvfp4_swizzled(side, one, *options) for side in sides)
    added = (numbers % 11).to(torch.bfloat16)
    for also in (added, None):
        given = Operands(left, right, scale_left, scale_right, one / 1024, also, None, torch.bfloat16)
        got, expected = torch.empty_like(added), reference(given)
        by_cublaslt(library, given, got)
        if not torch.equal(got, expected):
            raise CublasLtError("the result of a small NVFP4 gemm was wrong")


def _checked(*arguments: Any, **options: Any) -> Tensor:
    given = Operands(*arguments, **options)
    name, (m, half), n = "cublaslt_nvfp4_mm", given.left.shape, given.right.shape[0]
    for side, codes, rows in (("left", given.left, m), ("right", given.right, n)):
        check_operand(name, side, codes, (torch.uint8,), (rows, half), contiguous=True)
    check_operand(name, "alpha", given.alpha, FP32)
    check_value(name, "numbers in alpha", given.alpha.numel(), (1,))
    if given.bias is not None:
        check_operand(name, "bias", given.bias, FLOATS, (n,))
    check_value(name, "out_dtype", given.out_dtype, FLOATS)
    return reference(given)


def _plain_out(*arguments: Any, out: Tensor, **options: Any) -> Tensor:
    return out.copy_(reference(Operands(*arguments, **options)))


def _multiply(*arguments: Any, **options: Any) -> Tensor:
    return _multiply_out(*arguments, **options, out=_new(*arguments, **options))


def _multiply_out(*arguments: Any, out: Tensor, **options: Any) -> Tensor:
    given = Operands(*arguments, **options)
    library = nvfp4_library_of(out.device.index)
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
    return given.left.new_empty((given.left.shape[0], given.right.shape[0]), dtype=given.out_dtype)


_ARGUMENTS = (
    "Tensor left, Tensor right, Tensor scale_left, Tensor scale_right, Tensor alpha, Tensor? added, Tensor? bias, "
    "ScalarType out_dtype"
)
cublaslt_nvfp4_mm_op = define(f"cublaslt_nvfp4_mm({_ARGUMENTS}) -> Tensor", _checked, _new, cuda=_multiply)
cublaslt_nvfp4_mm_out_op = define(
    f"cublaslt_nvfp4_mm.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)", _plain_out, None, cuda=_multiply_out
)


@register_flop_formula(torch.ops.fp8_compile.cublaslt_nvfp4_mm)
def _flops(left: Any, right: Any, *others: Any, out_shape: Any = None, **options: Any) -> int:
    """The partitioner weighs by it what to compute again; ``left`` and ``right`` are sizes, of two codes each."""
    return 4 * left[0] * left[1] * right[0]
