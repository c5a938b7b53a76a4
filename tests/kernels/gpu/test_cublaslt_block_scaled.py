"""Gemms of MXFP8 and NVFP4 operands by a stand-in for cuBLASLt, called from C++ and from Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from fp8_compile.kernels.gpu import cublaslt_mx_mm, cublaslt_nvfp4_mm
from fp8_compile.kernels.gpu.cublaslt import CublasLt, CublasLtError
from fp8_compile.kernels.gpu.cublaslt_compiled import fastest
from fp8_compile.kernels.gpu.cublaslt_op import Library
from fp8_compile.kernels.nvfp4_swizzled import quantize_nvfp4_swizzled


@pytest.fixture(params=[fastest, CublasLt], ids=["C++", "Python"])
def library(request: pytest.FixtureRequest, stand_in: ctypes.CDLL) -> Library:
    new: Callable[[ctypes.CDLL], Library] = request.param
    return new(stand_in)


def test_the_checks_before_the_first_gemm_pass_and_find_a_library_that_is_wrong(
    library: Library, stand_in: ctypes.CDLL
) -> None:
    factor = ctypes.c_float.in_dll(stand_in, "factor")
    for check in (cublaslt_mx_mm.GEMM.check, cublaslt_nvfp4_mm.GEMM.check):
        check(library, torch.device("cpu"))
        factor.value = 0.5
        with pytest.raises(CublasLtError, match="was wrong"):
            check(library, torch.device("cpu"))
        factor.value = 1.0


@pytest.mark.parametrize("added, biased", [(False, False), (True, True), (False, True)])
def test_nvfp4_operands_are_multiplied_as_the_formula_says(
    library: Library, generator: torch.Generator, added: bool, biased: bool
) -> None:
    one = torch.ones(1, 1)
    options = (1.0, (1, 16), False, False, None, 0, False, 96)
    (left, scale_left), (right, scale_right) = (
        quantize_nvfp4_swizzled(torch.randn(rows, 96, generator=generator), one * 400, *options) for rows in (160, 64)
    )
    c = torch.randn(160, 64, generator=generator).bfloat16() if added else None
    bias = torch.randn(64, generator=generator).bfloat16() if biased else None
    alpha = torch.tensor([0.0, 400.0**-2])[1:]  # a part of the products of a graph
    given = cublaslt_nvfp4_mm.Operands(left, right, scale_left, scale_right, alpha, c, bias, torch.bfloat16)
    y = torch.empty(160, 64, dtype=torch.bfloat16)
    cublaslt_nvfp4_mm.GEMM.by_cublaslt(library, given, y)
    expected = cublaslt_nvfp4_mm.GEMM.reference(given._replace(out_dtype=torch.float32))
    torch.testing.assert_close(y.float(), expected, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(cublaslt_nvfp4_mm.cublaslt_nvfp4_mm_op(*given), expected.bfloat16())
