"""The FP8 gemm that adds a matrix to its product, as an operation of a graph.

    y = left @ right * scale_left * scale_right + bias + added

left: [M, K], right: [K, N] fp8; scale_left, scale_right: one fp32 each; bias: [N]; added: [M, N] -> y: [M, N], in the
dtype of ``added``. Only the result is rounded.

A residual, or the sum of the gradients of a tensor that several layers read, costs a pass over memory where it is an
addition of its own: the product is written, read back, and the sum written. cuBLASLt reads ``added`` while it writes.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import (
    add_layout_constraint,
    constrain_to_fx_strides,
    fallback_handler,
    register_lowering,
)
from torch._inductor.virtualized import V

from ..scaled_mm import scaled_mm
from .cublaslt import CublasLt, CublasLtError

PROBE_SIZE = 64


class Operands(NamedTuple):
    """What the operation takes, in the order in which it takes them."""

    left: Tensor
    right: Tensor
    scale_left: Tensor
    scale_right: Tensor
    added: Tensor
    bias: Tensor | None = None
    fast_accumulation: bool = False


def reference(given: Operands) -> Tensor:
    """The formula above in plain PyTorch."""
    scales = (given.scale_left.view(1, 1), given.scale_right.view(1, 1))
    product = scaled_mm(given.left, given.right, *scales, given.bias, torch.float32)
    return (product + given.added).to(given.added.dtype)


def in_one_step(library: CublasLt, given: Operands, y: Tensor) -> None:
    """The formula with cuBLASLt, on the current stream."""
    if y.numel():
        library.multiply_add(
            *(given.left, given.right, given.scale_left, given.scale_right, given.bias, given.added, y),
            fast_accumulation=given.fast_accumulation,
            stream=torch.cuda.current_stream(y.device).cuda_stream if y.is_cuda else 0,
        )


def in_two_steps(given: Operands, y: Tensor) -> None:
    """The formula with torch's own gemm, whose result is rounded before the addition."""
    torch._scaled_mm(
        *(given.left, given.right, given.scale_left.view(1, 1), given.scale_right.view(1, 1)),
        bias=given.bias,
        out_dtype=y.dtype,
        use_fast_accum=given.fast_accumulation,
        out=y,
    )
    y.add_(given.added)


@functools.cache
def library_of(device: int) -> CublasLt | None:
    """cuBLASLt on a device, once a small gemm there gave what torch's own gives; a warning says why not."""
    try:
        library = CublasLt(ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}"))
        check(library, torch.device("cuda", device))
        return library
    except (OSError, CublasLtError) as error:
        _warn(f"cuda:{device}", error)
        return None


def _warn(where: str, error: Exception) -> None:
    warnings.warn(
        f"{where}: FP8 gemms add residuals in a step of their own, which costs a pass over memory, because cuBLASLt "
        f"could not be used directly: {error}",
        stacklevel=2,
    )


def check(library: CublasLt, device: torch.device) -> None:
    """Compute a small gemm whose numbers are exact in bf16; ``CublasLtError`` if one of them is wrong."""
    numbers = torch.arange(PROBE_SIZE * PROBE_SIZE, device=device).view(PROBE_SIZE, PROBE_SIZE)
    left, right = ((numbers % prime == 0).to(torch.float8_e4m3fn) for prime in (7, 5))
    scales = (torch.tensor(0.5, device=device), torch.tensor(2.0, device=device))
    given = Operands(left, right.t(), *scales, added=(numbers % 11).to(torch.bfloat16))
    got, expected = torch.empty_like(given.added), reference(given)
    in_one_step(library, given, got)
    if not torch.equal(got, expected):
        raise CublasLtError("the result of a small gemm was wrong")


def _write(*arguments: Any, out: Tensor) -> Tensor:
    given = Operands(*arguments)
    if not out.is_cuda:
        return out.copy_(reference(given))
    library = library_of(out.device.index)
    if library is not None:
        try:
            in_one_step(library, given, out)
            return out
        except CublasLtError as error:  # a shape that it has no kernel for
            _warn(str(tuple(out.shape)), error)
    in_two_steps(given, out)
    return out


def _compute(*arguments: Any) -> Tensor:
    return _write(*arguments, out=torch.empty_like(Operands(*arguments).added, memory_format=torch.contiguous_format))


def _fake(*arguments: Any) -> Tensor:
    added = Operands(*arguments).added
    return added.new_empty(added.shape)


_ARGUMENTS = (
    "Tensor left, Tensor right, Tensor scale_left, Tensor scale_right, Tensor added, Tensor? bias=None, "
    "bool fast_accumulation=False"
)
_library = torch.library.Library("fp8_compile", "FRAGMENT")
_library.define(f"scaled_mm_add({_ARGUMENTS}) -> Tensor")
_library.define(f"scaled_mm_add.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)")
_library.impl("scaled_mm_add", _compute, "CompositeExplicitAutograd")
_library.impl("scaled_mm_add.out", _write, "CompositeExplicitAutograd")
torch.library.register_fake("fp8_compile::scaled_mm_add", _fake, lib=_library)
scaled_mm_add_op = torch.ops.fp8_compile.scaled_mm_add.default
_out = torch.ops.fp8_compile.scaled_mm_add.out

add_layout_constraint(scaled_mm_add_op, constrain_to_fx_strides)
_fallback = fallback_handler(scaled_mm_add_op, add_to_fallback_set=False)


@register_lowering(scaled_mm_add_op, type_promotion_kind=None)
def _lowering(left, right, scale_left, scale_right, added, bias=None, fast_accumulation=False):  # type: ignore[no-untyped-def]
    if V.graph.cpp_wrapper:  # C++ knows no name to call it by, and asks Python
        return _fallback(left, right, scale_left, scale_right, added, bias, fast_accumulation)
    tensors = [left, right, scale_left, scale_right, added, *([] if bias is None else [bias])]
    node = ir.ExternKernelOut(
        layout=ir.FixedLayout(added.get_device(), added.get_dtype(), added.get_size()),
        inputs=[ir.ExternKernel.realize_input(tensor) for tensor in tensors],
        constant_args=[*([None] if bias is None else []), fast_accumulation],
        python_kernel_name="torch.ops.fp8_compile.scaled_mm_add.out",
        op_overload=_out,
    )
    return ir.TensorBox.create(node)
