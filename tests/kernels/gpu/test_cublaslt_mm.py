"""The gemm that adds and reads any layout, against FP64, by a stand-in for cuBLASLt that holds us to its manual."""

from __future__ import annotations

import ctypes
import pathlib
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.utils.flop_counter import FlopCounterMode

import fp8_compile.kernels.inductor  # noqa: F401  registers the lowering
from fp8_compile.kernels.gpu import cublaslt, cublaslt_mm
from fp8_compile.kernels.gpu.cublaslt import CublasLt, CublasLtError
from fp8_compile.kernels.gpu.cublaslt_mm import Operands, by_cublaslt, check, cublaslt_mm_op, reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STAND_IN = pathlib.Path(__file__).parents[2] / "support" / "cublaslt_stand_in.c"
HALF_A_STEP = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in with")
    built = tmp_path_factory.mktemp("cublaslt") / "libcublasLt.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", built, STAND_IN, "-lm"], check=True)
    return ctypes.CDLL(str(built))


@pytest.fixture
def library(stand_in: ctypes.CDLL) -> CublasLt:
    return CublasLt(stand_in)


def operands(
    m: int = 48,
    n: int = 32,
    k: int = 64,
    formats: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    fast: bool = False,
    added: bool = True,
    lies: str = "KK",
) -> Operands:
    """``lies``: the dimension that is contiguous in each operand."""
    torch.manual_seed(m + n + k)
    left, right = torch.randn(m, k).to(formats[0]), torch.randn(n, k).to(formats[1]).t()
    left = left if lies[0] == "K" else left.t().contiguous().t()
    right = right if lies[1] == "K" else right.contiguous()
    c = torch.randn(m, n).to(dtype) if added else None
    offset = torch.randn(n).to(torch.bfloat16) if bias else None
    return Operands(left, right, torch.tensor(0.3), torch.tensor([[1.7]]), c, offset, dtype, fast)


def empty(given: Operands) -> Tensor:
    return torch.empty(given.left.shape[0], given.right.shape[1], dtype=given.out_dtype)


def exact(given: Operands) -> Tensor:
    product = given.left.double() @ given.right.double() * given.scale_left.double() * given.scale_right.double()
    return product + sum(one.double() for one in (given.added, given.bias) if one is not None)


def assert_rounded_once(actual: Tensor, given: Operands) -> None:
    """Within half a step of the dtype, and what FP32 sums of these magnitudes lose."""
    expected = exact(given)
    size = (given.left.double().abs() @ given.right.double().abs()).max() * 0.51 + 16
    budget = HALF_A_STEP[actual.dtype] * expected.abs() + 2**-22 * size
    assert actual.dtype == given.out_dtype
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
    dict(added=False),
    dict(added=False, bias=True, dtype=torch.float16),
    dict(lies="MN"),
    dict(lies="KN", added=False, formats=(E5M2, E4M3)),
    dict(lies="MK", bias=True),
]


@pytest.fixture(autouse=True)
def any_layout(library: CublasLt) -> Iterator[ctypes.c_int]:
    """What the stand-in's GPU can do: 1, read any layout, as compute capability 10 does; 0, as others."""
    flag = ctypes.c_int.in_dll(library._library, "any_layout")
    flag.value = 1
    yield flag
    flag.value = 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_result_is_the_exact_sum_rounded_once(library: CublasLt, case: dict) -> None:
    given = operands(**case)
    y = empty(given)
    by_cublaslt(library, given, y)
    assert_rounded_once(y, given)
    assert_rounded_once(reference(given), given)
    assert_rounded_once(cublaslt_mm_op(*given), given)
    torch.library.opcheck(cublaslt_mm_op, tuple(given), test_utils="test_faketensor")
    with FlopCounterMode(display=False) as counter:
        cublaslt_mm_op(*given)
    (m, k), n = given.left.shape, given.right.shape[1]
    assert counter.get_total_flops() == 2 * m * n * k


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_inductor_calls_it_with_and_without_a_bias_and_a_sum(cpp_wrapper: bool) -> None:
    all_given = [operands(), operands(bias=True), operands(added=False, lies="MN"), operands(added=False, bias=True)]

    def multiply(all_given: list[Operands]) -> list[Tensor]:
        return [cublaslt_mm_op(*given) + 1 for given in all_given]

    with inductor_config.patch(cpp_wrapper=cpp_wrapper, force_disable_caches=True):
        results = torch.compile(multiply, fullgraph=True)(all_given)
    for actual, expected in zip(results, multiply(all_given), strict=True):
        torch.testing.assert_close(actual, expected)


def test_rows_with_gaps_between_them_and_a_result_that_replaces_what_is_added(library: CublasLt) -> None:
    given = operands()
    wide = torch.zeros(48, 64, dtype=torch.bfloat16)
    padded = torch.zeros(48, 80, dtype=torch.uint8).view(E4M3)
    padded[:, :64].view(torch.uint8).copy_(given.left.view(torch.uint8))
    wide[:, :32] = given.added
    expected = exact(given)
    given = given._replace(left=padded[:, :64], added=wide[:, :32])
    by_cublaslt(library, given, given.added)
    torch.testing.assert_close(given.added.double(), expected, rtol=2**-8, atol=1e-5)
    assert not wide[:, 32:].any()


def test_one_description_serves_other_addresses_of_the_same_shape(library: CublasLt) -> None:
    first, second = operands(bias=True), operands(bias=True)
    for one in (second.left.view(torch.uint8), second.right.view(torch.uint8)):
        one.copy_(one.flip(0))
    second = second._replace(scale_left=torch.tensor(3.0), bias=second.bias + 1)
    for given in (first, second, first):
        y = empty(given)
        by_cublaslt(library, given, y)
        assert_rounded_once(y, given)


@pytest.mark.parametrize("name", ["scale_left", "scale_right", "left", "added"])
def test_a_nan_reaches_the_result(library: CublasLt, name: str) -> None:
    given = operands()
    bad = getattr(given, name).clone()
    bad.view(-1)[0] = torch.nan
    given = given._replace(**{name: bad})
    y = empty(given)
    by_cublaslt(library, given, y)
    assert y.isnan().any() and torch.equal(y.isnan(), exact(given).isnan()) and reference(given).isnan().any()


def test_no_rows_are_no_call(library: CublasLt) -> None:
    given = operands(m=0)
    by_cublaslt(library, given, empty(given))
    assert cublaslt_mm_op(*given).shape == (0, 32)


def test_what_the_library_cannot_do_is_an_error_that_says_what(library: CublasLt) -> None:
    given = operands(formats=(E5M2, E5M2))
    with pytest.raises(CublasLtError, match="cublasLtMatmulAlgoGetHeuristic failed with status 15"):
        by_cublaslt(library, given, empty(given))


def test_plans_are_given_back_when_many_shapes_were_multiplied(
    library: CublasLt, stand_in: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublaslt, "MOST_PLANS", 2)
    objects = ctypes.c_int.in_dll(stand_in, "objects")
    objects.value = 0
    for m in (16, 32, 48, 16):
        given = operands(m=m)
        y = empty(given)
        by_cublaslt(library, given, y)
        assert_rounded_once(y, given)
    assert objects.value == 2 * 5  # a description and four layouts each


def test_a_shape_without_a_kernel_is_asked_for_once_and_leaves_nothing_behind(
    library: CublasLt, stand_in: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = ctypes.c_int.in_dll(stand_in, "objects")
    objects.value = 0
    given = operands(formats=(E5M2, E5M2))
    y = empty(given)  # one: how it is aligned is part of what is asked for
    for _ in range(2):
        with pytest.raises(CublasLtError, match="status 15"):
            by_cublaslt(library, given, y)
        monkeypatch.setattr(library, "_plan", None)  # another try would fail otherwise
    assert objects.value == 0


def test_a_gpu_that_reads_k_contiguous_operands_only_says_no_to_others(
    library: CublasLt, any_layout: ctypes.c_int
) -> None:
    any_layout.value = 0
    by_cublaslt(library, operands(k=80), empty(operands(k=80)))
    given = operands(k=80, lies="MN")
    with pytest.raises(CublasLtError, match="status 15"):
        by_cublaslt(library, given, empty(given))
    with pytest.raises(CublasLtError, match="status 15"):
        check(library, torch.device("cpu"), any_layout=True)


def test_a_library_that_computes_wrongly_is_found_out_before_it_is_used(
    library: CublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(library, torch.device("cpu"), any_layout=True)
    monkeypatch.setattr(library, "_one", ctypes.c_float(0.5))
    with pytest.raises(CublasLtError, match="small gemm was wrong"):
        check(library, torch.device("cpu"))


def test_without_the_library_a_warning_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    with pytest.warns(UserWarning, match="cuda:7: FP8 gemms copy operands and add residuals.*libcublasLt.so.0"):
        assert cublaslt_mm.library_of(7) is None
    cublaslt_mm.library_of.cache_clear()


@pytest.mark.parametrize("lies", ["KK", "MN"])
def test_two_steps_give_the_sum_of_the_rounded_product(lies: str) -> None:
    given = operands(dtype=torch.float32, lies=lies)
    y = empty(given)
    cublaslt_mm.by_torch(given, y)
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
