"""Triton's interpreter rounds FP8 wrongly; corrected, it gives torch's bytes. Nothing of it stays behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreted import check_same, interpreted
from triton.runtime import interpreter as triton_interpreter

from fp8_compile.kernels.formats import BY_DTYPE, Format
from fp8_compile.kernels.gpu import interpreter
from fp8_compile.kernels.gpu.ahead_of_time import compile_for
from fp8_compile.torch_internals import releases

FORMATS = list(BY_DTYPE.values())
each_format = pytest.mark.parametrize("format", FORMATS, ids=str)


@triton.jit
def cast_kernel(x_ptr, q_ptr, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < numel)
    tl.store(q_ptr + offsets, x.to(q_ptr.dtype.element_ty), mask=offsets < numel)


class Here:
    """This module's kernel, as ``interpreted`` wants it: a place with attributes."""


def cast(x: torch.Tensor, dtype: torch.dtype, correct: bool = True) -> torch.Tensor:
    place = Here()
    place.cast_kernel = cast_kernel
    q = torch.empty_like(x, dtype=dtype)
    with interpreted(place, correct=correct):
        place.cast_kernel[(triton.cdiv(x.numel(), 1024),)](x, q, x.numel(), BLOCK=1024)
    return q


def values_of(format: Format) -> torch.Tensor:
    """Every value of the format, what lies halfway, just beside both, and what is beyond the largest."""
    codes = torch.arange(256, dtype=torch.uint8).view(format.dtype).double()
    exact = codes[codes.isfinite()].unique()
    halfway = (exact[1:] + exact[:-1]) / 2
    near = torch.cat([exact, halfway]).float()
    around = [torch.nextafter(near, torch.tensor(side)) for side in (-torch.inf, torch.inf)]
    beyond = torch.tensor([format.max * 1.01, format.max * 2, 3e38, torch.inf, 1e-30, 1e-45, 0.0, torch.nan])
    return torch.cat([near, *around, beyond, -beyond])


def test_without_the_correction_a_mantissa_carry_is_lost_and_ties_go_up() -> None:
    x = torch.tensor([125.7, 17.0])
    assert cast(x, torch.float8_e4m3fn, correct=False).float().tolist() == [64.0, 18.0]
    assert cast(x, torch.float8_e4m3fn).float().tolist() == x.to(torch.float8_e4m3fn).float().tolist() == [128.0, 16.0]


@pytest.mark.skipif(not releases.interpreter_refuses_fnuz(), reason="this release of Triton knows these formats")
def test_without_the_correction_the_formats_of_mi300_are_refused() -> None:
    with pytest.raises(triton_interpreter.InterpreterError, match="fail to convert fp8e4b8"):
        cast(torch.ones(1), torch.float8_e4m3fnuz, correct=False)


@triton.jit
def first_program_kernel(q_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(q_ptr + offsets, offsets, mask=(offsets > 1) & (tl.program_id(0) == 0))


def test_a_comparison_of_scalars_can_be_part_of_a_mask_and_needs_the_correction_where_it_is_installed() -> None:
    place = Here()
    place.first_program_kernel = first_program_kernel

    def stored(correct: bool) -> list[int]:
        q = torch.full((4,), 9)
        with interpreted(place, correct=correct):
            place.first_program_kernel[(2,)](q, BLOCK=4)
        return q.tolist()

    assert stored(correct=True) == [9, 9, 2, 3]
    if releases.interpreter_wants_boolean_masks():
        with pytest.raises(triton_interpreter.InterpreterError, match="mask has unsupported dtype"):
            stored(correct=False)
    else:
        assert stored(correct=False) == [9, 9, 2, 3]


def test_each_correction_that_is_installed_is_needed_in_this_release() -> None:
    needed = {one.name for one in interpreter.CORRECTIONS if one.is_needed()}
    expected = {"_convert_float", "create_dot"}
    expected |= {"_patch_lang_core"} if releases.triton_release() == (3, 7) else set()
    expected |= {"create_splat"} if (releases.triton_release() or (0, 0)) >= (3, 9) else set()
    assert needed == expected


@each_format
def test_a_corrected_cast_is_torchs_and_saturates_as_the_hardware(format: Format) -> None:
    x = values_of(format)
    q = cast(x, format.dtype)
    check_same(q, x.clamp(-format.max, format.max).to(format.dtype))
    within = x.abs() <= format.max
    check_same(q[within], x[within].to(format.dtype))
    assert q[x.isnan()].float().isnan().all()


@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_goes_to_fp8_and_back_as_torch_has_it(format: Format, dtype: torch.dtype) -> None:
    x = values_of(format).to(dtype)
    check_same(cast(x, format.dtype), x.double().clamp(-format.max, format.max).to(dtype).to(format.dtype))
    every = torch.arange(256, dtype=torch.uint8).view(format.dtype)
    check_same(cast(every, dtype), every.to(dtype))


def test_every_bf16_number_widens_exactly_subnormals_included() -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    check_same(cast(x, torch.float32), x.float())


def test_install_and_uninstall_change_and_restore_tritons_functions() -> None:
    before = triton_interpreter._convert_float
    interpreter.install()
    try:
        assert triton_interpreter._convert_float is interpreter.convert_float
        bits = triton_interpreter._convert_float(np.array([125.7], np.float32), tl.float32, tl.float8e4nv, None)
        assert bits.tolist() == [0x70]
    finally:
        interpreter.uninstall()
    assert triton_interpreter._convert_float is before


def test_after_interpreting_the_same_kernel_still_compiles() -> None:
    cast(torch.ones(4), torch.float8_e4m3fn)
    assert isinstance(tl.max, triton.JITFunction) and tl.load.__module__ == "triton.language.core"
    types = {"x_ptr": "*fp32", "q_ptr": "*fp8e4nv", "numel": "i32"}
    assert "cubin" in compile_for("cuda:90", cast_kernel, types, {"BLOCK": 1024}, num_warps=4).asm
