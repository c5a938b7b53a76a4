"""The gemm that adds, against FP64, through a stand-in for cuBLASLt that holds us to its manual."""

from __future__ import annotations

import ctypes
import pathlib
import re
import shutil
import subprocess
import sysconfig

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

from fp8_compile.kernels.gpu import cublaslt, scaled_mm_add
from fp8_compile.kernels.gpu.cublaslt import CublasLt, CublasLtError
from fp8_compile.kernels.gpu.scaled_mm_add import Operands, check, in_one_step, reference, scaled_mm_add_op

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STAND_IN = pathlib.Path(__file__).parents[2] / "support" / "cublaslt_stand_in.c"
HALF_A_STEP = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CublasLt:
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in with")
    built = tmp_path_factory.mktemp("cublaslt") / "libcublasLt.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", built, STAND_IN, "-lm"], check=True)
    return CublasLt(ctypes.CDLL(str(built)))


def operands(
    m: int = 48,
    n: int = 32,
    k: int = 64,
    formats: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    fast: bool = False,
) -> Operands:
    torch.manual_seed(m + n + k)
    left, right = torch.randn(m, k).to(formats[0]), torch.randn(n, k).to(formats[1]).t()
    added = torch.randn(m, n).to(dtype)
    offset = torch.randn(n).to(torch.bfloat16) if bias else None
    return Operands(left, right, torch.tensor(0.3), torch.tensor([[1.7]]), added, offset, fast)


def exact(given: Operands) -> Tensor:
    product = given.left.double() @ given.right.double() * given.scale_left.double() * given.scale_right.double()
    return product + given.added.double() + (0 if given.bias is None else given.bias.double())


def assert_rounded_once(actual: Tensor, given: Operands) -> None:
    """Within half a step of the dtype, and what FP32 sums of these magnitudes lose."""
    expected = exact(given)
    size = (given.left.double().abs() @ given.right.double().abs()).max() * 0.51 + given.added.double().abs().max() + 4
    budget = HALF_A_STEP[actual.dtype] * expected.abs() + 2**-22 * size
    assert actual.dtype == given.added.dtype
    assert ((actual.double() - expected).abs() <= budget).all()


CASES = [
    dict(),
    dict(formats=(E5M2, E4M3)),
    dict(formats=(E4M3, E5M2), fast=True),
    dict(dtype=torch.float32),
    dict(dtype=torch.float16, m=16, n=16, k=16),
    dict(bias=True),
    dict(m=1, n=16, k=16),
    dict(m=17, n=48, k=160, bias=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_result_is_the_exact_sum_rounded_once(library: CublasLt, case: dict) -> None:
    given = operands(**case)
    y = torch.empty_like(given.added)
    in_one_step(library, given, y)
    assert_rounded_once(y, given)
    assert_rounded_once(reference(given), given)
    assert_rounded_once(scaled_mm_add_op(*given), given)
    torch.library.opcheck(scaled_mm_add_op, tuple(given), test_utils="test_faketensor")


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_inductor_calls_it_with_and_without_a_bias(cpp_wrapper: bool) -> None:
    given, with_bias = operands(), operands(bias=True)

    def both(one: Operands, other: Operands) -> tuple[Tensor, Tensor]:
        return scaled_mm_add_op(*one) + 1, scaled_mm_add_op(*other)

    with fresh_cache(), inductor_config.patch(cpp_wrapper=cpp_wrapper):
        results = torch.compile(both, fullgraph=True)(given, with_bias)
    for actual, expected in zip(results, both(given, with_bias), strict=True):
        torch.testing.assert_close(actual, expected)


def test_rows_with_gaps_between_them_and_a_result_that_replaces_what_is_added(library: CublasLt) -> None:
    given = operands()
    wide = torch.zeros(48, 64, dtype=torch.bfloat16)
    padded = torch.zeros(48, 80, dtype=torch.uint8).view(E4M3)
    padded[:, :64].view(torch.uint8).copy_(given.left.view(torch.uint8))
    wide[:, :32] = given.added
    expected = exact(given)
    given = given._replace(left=padded[:, :64], added=wide[:, :32])
    in_one_step(library, given, given.added)
    torch.testing.assert_close(given.added.double(), expected, rtol=2**-8, atol=1e-5)
    assert not wide[:, 32:].any()


def test_one_description_serves_other_addresses_of_the_same_shape(library: CublasLt) -> None:
    first, second = operands(bias=True), operands(bias=True)
    for one in (second.left.view(torch.uint8), second.right.view(torch.uint8)):
        one.copy_(one.flip(0))
    second = second._replace(scale_left=torch.tensor(3.0), bias=second.bias + 1)
    for given in (first, second, first):
        y = torch.empty_like(given.added)
        in_one_step(library, given, y)
        assert_rounded_once(y, given)


@pytest.mark.parametrize("name", ["scale_left", "scale_right", "left", "added"])
def test_a_nan_reaches_the_result(library: CublasLt, name: str) -> None:
    given = operands()
    bad = getattr(given, name).clone()
    bad.view(-1)[0] = torch.nan
    given = given._replace(**{name: bad})
    y = torch.empty_like(given.added)
    in_one_step(library, given, y)
    assert y.isnan().any() and torch.equal(y.isnan(), exact(given).isnan()) and reference(given).isnan().any()


def test_no_rows_are_no_call(library: CublasLt) -> None:
    given = operands(m=0)
    in_one_step(library, given, torch.empty_like(given.added))
    assert scaled_mm_add_op(*given).shape == (0, 32)


def test_what_the_library_cannot_do_is_an_error_that_says_what(library: CublasLt) -> None:
    given = operands(formats=(E5M2, E5M2))
    with pytest.raises(CublasLtError, match="cublasLtMatmulAlgoGetHeuristic failed with status 15"):
        in_one_step(library, given, torch.empty_like(given.added))


def test_a_library_that_computes_wrongly_is_found_out_before_it_is_used(
    library: CublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(library, torch.device("cpu"))
    monkeypatch.setattr(library, "_one", ctypes.c_float(0.5))
    with pytest.raises(CublasLtError, match="small gemm was wrong"):
        check(library, torch.device("cpu"))


def test_without_the_library_a_warning_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    with pytest.warns(UserWarning, match="cuda:7: FP8 gemms add residuals in a step of their own.*libcublasLt.so.0"):
        assert scaled_mm_add.library_of(7) is None
    scaled_mm_add.library_of.cache_clear()


def test_two_steps_give_the_sum_of_the_rounded_product() -> None:
    given = operands(dtype=torch.float32)
    y = torch.empty_like(given.added)
    scaled_mm_add.in_two_steps(given, y)
    torch.testing.assert_close(y.double(), exact(given), rtol=1e-5, atol=1e-4)


def header(name: str) -> str:
    folders = [pathlib.Path(sysconfig.get_path("purelib")), pathlib.Path("/usr/local")]
    found = [file for folder in folders for file in folder.glob(f"*/*/include/{name}")]
    if not found:
        pytest.skip(f"{name} is not on this machine")
    return found[0].read_text(errors="replace")


def test_the_constants_are_those_of_the_headers_where_they_are_installed() -> None:
    text = header("cublasLt.h")
    names = {f"CUBLASLT_MATMUL_{name}": number for name, number in vars(cublaslt).items() if name.startswith("DESC_")}
    names["CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES"] = cublaslt.PREF_MAX_WORKSPACE_BYTES
    for operand, number in zip("ABCD", cublaslt.PREF_MIN_ALIGNMENT):
        names[f"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{operand}_BYTES"] = number
    for name, number in names.items():
        assert re.search(rf"\b{name} = {number},", text), name
