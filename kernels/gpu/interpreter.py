"""Make Triton's interpreter convert floats as the hardware does.

    to FP8:    x.clamp(-F, F).to(fp8)      to nearest even, saturating, NaN stays NaN; torch's own cast on [-F, F]
    the rest:  x.to(dtype)

What is wrong (``patches.TABLE["interpreter"]``): ``triton.runtime.interpreter._convert_float`` adds the rounding
bit to the mantissa field alone, so that its carry is lost, and never looks at the sticky bits; ``to_ir`` there does not
know the FNUZ types. ``create_dot`` there widens FP8 and forgets bf16. Compiled kernels never come here.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from fp8_compile.kernels.formats import BY_DTYPE
from fp8_compile.torch_internals import patches

TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
FNUZ = {"fp8e4b8": "get_fp8e4b8_ty", "fp8e5b16": "get_fp8e5b16_ty"}


def convert_float(input: np.ndarray, input_dtype: tl.dtype, output_dtype: tl.dtype, rounding_mode: Any) -> np.ndarray:
    """The bits of ``input`` in ``output_dtype``, as unsigned integers: what ``_convert_float`` promises."""
    nearest_even = interpreter._ir.ROUNDING_MODE.RTNE
    if input_dtype not in TORCH or output_dtype not in TORCH or rounding_mode not in (None, nearest_even):
        return _original_convert_float(input, input_dtype, output_dtype, rounding_mode)
    source = torch.from_numpy(np.ascontiguousarray(input).view(np.uint8).copy()).view(TORCH[input_dtype])
    target = TORCH[output_dtype]
    if target in BY_DTYPE:
        source = source.double().clamp(-BY_DTYPE[target].max, BY_DTYPE[target].max).to(source.dtype)
    converted = source.to(target).contiguous().view(torch.uint8).numpy()
    return converted.view(UNSIGNED[output_dtype.primitive_bitwidth]).reshape(input.shape)


def _patch_lang_core(lang: Any, scope: Any) -> None:
    _original_patch_lang_core(lang, scope)
    known = lang.dtype.to_ir

    def to_ir(self: tl.dtype, builder: Any) -> Any:
        return getattr(builder, FNUZ[self.name])() if self.name in FNUZ else known(self, builder)

    scope.set_attr(lang.dtype, "to_ir", to_ir)


def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """``a @ b + d`` with bf16 widened to FP32 first, where its products are exact."""

    def widened(side: Any) -> Any:
        if side.dtype.scalar is not tl.bfloat16:
            return side
        bits = convert_float(side.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    return _original_create_dot(self, widened(a), widened(b), d, input_precision, max_num_imprecise_acc)


_original_create_dot = interpreter.InterpreterBuilder.create_dot
_original_convert_float = interpreter._convert_float
_original_patch_lang_core = interpreter._patch_lang_core


def install() -> None:
    """Correct the interpreter of this process, if it is one that the correction was written for."""
    if not patches.fits("interpreter"):
        return
    interpreter._convert_float = convert_float
    interpreter._patch_lang_core = _patch_lang_core
    interpreter.InterpreterBuilder.create_dot = create_dot


def uninstall() -> None:
    """Give Triton back its own functions."""
    interpreter._convert_float = _original_convert_float
    interpreter._patch_lang_core = _original_patch_lang_core
    interpreter.InterpreterBuilder.create_dot = _original_create_dot


@contextlib.contextmanager
def corrected() -> Iterator[None]:
    """``install`` for the length of a block."""
    builder = interpreter.InterpreterBuilder
    before = interpreter._convert_float, interpreter._patch_lang_core, builder.create_dot
    install()
    try:
        yield
    finally:
        interpreter._convert_float, interpreter._patch_lang_core, builder.create_dot = before
