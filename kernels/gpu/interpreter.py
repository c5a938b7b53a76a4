"""Make Triton's interpreter convert floats as the hardware does.

    to FP8:    x.clamp(-F, F).to(fp8)      to nearest even, saturating, NaN stays NaN; torch's own cast on [-F, F]
    the rest:  x.to(dtype)

What is wrong in ``triton.runtime.interpreter`` (``TRITON_INTERPRET=1``, ``patches.TABLE["interpreter"]``), by release:

    3.7 to 3.9  125.7 becomes 64 in E4M3, ties round up, bf16 subnormals come out wrong: ``_convert_float`` adds the
                rounding bit to the mantissa field alone, so that its carry is lost, and ignores the sticky bits.
    3.7 to 3.9  A ``tl.dot`` of bf16 multiplies the bits as if they were integers: ``create_dot`` widens FP8 only.
    3.7         The FNUZ formats of MI300 are refused: ``dtype.to_ir`` does not know them.
    3.9         "mask has unsupported dtype" where a comparison of scalars is part of a mask: it has the dtype of
                what was compared, ``create_splat`` makes integers of it, and loads and stores take booleans only.

Each correction is installed where its fault is; it can go when no supported release has the fault. Compiled kernels
never come here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, Iterator

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from fp8_compile.kernels.formats import BY_DTYPE
from fp8_compile.torch_internals import patches, releases

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


def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
    """A scalar in every element; what a comparison gave stays a boolean."""
    filled = _original_create_splat(self, ret_ty, arg)
    return interpreter.TensorHandle(filled.data.astype(bool), tl.int1) if arg.data.dtype == bool else filled


@dataclasses.dataclass(frozen=True)
class Correction:
    """A function of Triton's that is replaced, and whether the installed release has the fault."""

    owner: Any
    name: str
    corrected: Callable[..., Any]
    is_needed: Callable[[], bool]


def _rounds_wrongly() -> bool:
    bits = _original_convert_float(
        np.array([125.7], np.float32), tl.float32, tl.float8e4nv, interpreter._ir.ROUNDING_MODE.RTNE
    )
    return bits.tolist() != [0x70]


def _takes_bf16_for_integers() -> bool:
    one = interpreter.TensorHandle(np.full((1, 1), 0x3F80, np.uint16), tl.bfloat16)
    zero = interpreter.TensorHandle(np.zeros((1, 1), np.float32), tl.float32)
    return _original_create_dot(interpreter.interpreter_builder, one, one, zero, None, None).data.item() != 1.0


_builder = interpreter.InterpreterBuilder
_original_convert_float = interpreter._convert_float
_original_patch_lang_core = interpreter._patch_lang_core
_original_create_dot = _builder.create_dot
_original_create_splat = _builder.create_splat
CORRECTIONS = (
    Correction(interpreter, "_convert_float", convert_float, _rounds_wrongly),
    Correction(interpreter, "_patch_lang_core", _patch_lang_core, releases.interpreter_refuses_fnuz),
    Correction(_builder, "create_dot", create_dot, _takes_bf16_for_integers),
    Correction(_builder, "create_splat", create_splat, releases.interpreter_wants_boolean_masks),
)
_ORIGINALS = tuple(getattr(one.owner, one.name) for one in CORRECTIONS)


def install() -> None:
    """Correct the interpreter of this process, if it is one that the corrections were written for."""
    if not patches.fits("interpreter"):
        return
    for one in CORRECTIONS:
        if one.is_needed():
            setattr(one.owner, one.name, one.corrected)


def uninstall() -> None:
    """Give Triton back its own functions."""
    _put_back(_ORIGINALS)


@contextlib.contextmanager
def corrected() -> Iterator[None]:
    """``install`` for the length of a block."""
    before = tuple(getattr(one.owner, one.name) for one in CORRECTIONS)
    install()
    try:
        yield
    finally:
        _put_back(before)


def _put_back(functions: tuple[Any, ...]) -> None:
    for one, function in zip(CORRECTIONS, functions):
        setattr(one.owner, one.name, function)
