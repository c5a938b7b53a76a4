"""The lowering of ``kernels/gpu/cublaslt_mm.py``, ``cublaslt_mx_mm.py`` and ``cublaslt_nvfp4_mm.py``: a call that
writes to memory which Inductor has planned."""

from __future__ import annotations

from typing import Any

from torch._inductor import ir
from torch._inductor.lowering import (
    add_layout_constraint,
    constrain_to_fx_strides,
    fallback_handler,
    register_lowering,
)
from torch._inductor.virtualized import V

from fp8_compile.kernels.gpu import cublaslt_mm, cublaslt_mx_mm, cublaslt_nvfp4_mm
from fp8_compile.kernels.gpu.rowwise_mm import rowwise_mm_op
from fp8_compile.kernels.mx_grouped_mm import swizzled_mx_grouped_mm_op


def _in_memory_as_in_the_graph(fx_node: Any, *args: Any, **kwargs: Any) -> Any:
    """A tensor goes to memory once, for all that read it: of a permuted one Inductor would store a second copy."""
    for arg in args:
        if isinstance(arg, ir.TensorBox):
            arg.data.unwrap_view().realize() if isinstance(arg.data, ir.BaseView) else arg.realize()
    return constrain_to_fx_strides(fx_node, *args, **kwargs)


def _register(gemm: Any) -> None:
    op = gemm.op
    add_layout_constraint(op, _in_memory_as_in_the_graph)
    fallback = fallback_handler(op, add_to_fallback_set=False)

    @register_lowering(op, type_promotion_kind=None)
    def lowering(left: Any, right: Any, *others: Any, out_dtype: Any = None, **options: Any) -> Any:
        rest = list(others)
        out_dtype = rest.pop() if out_dtype is None else out_dtype
        *_, added, bias = given = (left, right, *rest)
        # C++ knows no name to call it by, and asks Python; Inductor writes tensors first, then what is not one.
        if V.graph.cpp_wrapper or (added is None and bias is not None):
            return fallback(*given, out_dtype, **options)
        tensors = [one for one in given if one is not None]
        node = ir.ExternKernelOut(
            layout=ir.FixedLayout(left.get_device(), out_dtype, list(gemm.size(left.get_size(), right.get_size()))),
            inputs=[ir.ExternKernel.realize_input(tensor) for tensor in tensors],
            constant_args=[None] * (len(given) - len(tensors)),
            kwargs={"out_dtype": out_dtype, **options},
            python_kernel_name=f"torch.ops.fp8_compile.{gemm.name}.out",
            op_overload=gemm.out_op,
        )
        return ir.TensorBox.create(node)


for module in (cublaslt_mm, cublaslt_mx_mm, cublaslt_nvfp4_mm):
    _register(module.GEMM)
for op in (rowwise_mm_op, swizzled_mx_grouped_mm_op):
    add_layout_constraint(op, _in_memory_as_in_the_graph)
