"""The gemm that adds and reads any layout, against FP64, by a stand-in for cuBLASLt that holds us to its manual; called
from C++ and from Python."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import pathlib
import re
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.utils.flop_counter import FlopCounterMode

import fp8_compile.kernels.inductor  # noqa: F401  registers the lowering
from fp8_compile.kernels.cpu.compiler import CompilationError
from fp8_compile.kernels.gpu import cublaslt, cublaslt_compiled, cublaslt_op
from fp8_compile.kernels.gpu.cublaslt import CublasLt, CublasLtError
from fp8_compile.kernels.gpu.cublaslt_compiled import CompiledCublasLt, fastest
from fp8_compile.kernels.gpu.cublaslt_mm import GEMM, Operands, cublaslt_mm_op
from fp8_compile.kernels.gpu.cublaslt_op import Library
from fp8_compile.torch_internals.inductor import NoCompiler

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF_A_STEP = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}


@pytest.fixture(params=[fastest, CublasLt], ids=["C++", "Python"])
def new_library(request: pytest.FixtureRequest) -> Callable[[ctypes.CDLL], Library]:
    return request.param


@pytest.fixture
def library(new_library: Callable[[ctypes.CDLL], Library], stand_in: ctypes.CDLL) -> Library:
    return new_library(stand_in)


@contextlib.contextmanager
def set_to(number: Any, value: float) -> Iterator[None]:
    """For a time, a number of the stand-in's."""
    before, number.value = number.value, value
    yield
    number.value = before


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_result_is_the_exact_sum_rounded_once(library: Library, case: dict) -> None:
    given = operands(**case)
    y = empty(given)
    GEMM.by_cublaslt(library, given, y)
    assert_rounded_once(y, given)
    assert_rounded_once(GEMM.reference(given), given)
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


def test_rows_with_gaps_between_them_and_a_result_that_replaces_what_is_added(library: Library) -> None:
    given = operands()
    wide = torch.zeros(48, 64, dtype=torch.bfloat16)
    padded = torch.zeros(48, 80, dtype=torch.uint8).view(E4M3)
    padded[:, :64].view(torch.uint8).copy_(given.left.view(torch.uint8))
    wide[:, :32] = given.added
    expected = exact(given)
    given = given._replace(left=padded[:, :64], added=wide[:, :32])
    GEMM.by_cublaslt(library, given, given.added)
    torch.testing.assert_close(given.added.double(), expected, rtol=2**-8, atol=1e-5)
    assert not wide[:, 32:].any()


def test_one_description_serves_other_addresses_of_the_same_shape(library: Library) -> None:
    first, second = operands(bias=True), operands(bias=True)
    for one in (second.left.view(torch.uint8), second.right.view(torch.uint8)):
        one.copy_(one.flip(0))
    second = second._replace(scale_left=torch.tensor(3.0), bias=second.bias + 1)
    for given in (first, second, first):
        y = empty(given)
        GEMM.by_cublaslt(library, given, y)
        assert_rounded_once(y, given)


@pytest.mark.parametrize("name", ["scale_left", "scale_right", "left", "added"])
def test_a_nan_reaches_the_result(library: Library, name: str) -> None:
    given = operands()
    bad = getattr(given, name).clone()
    bad.view(-1)[0] = torch.nan
    given = given._replace(**{name: bad})
    y = empty(given)
    GEMM.by_cublaslt(library, given, y)
    assert y.isnan().any() and torch.equal(y.isnan(), exact(given).isnan()) and GEMM.reference(given).isnan().any()


def test_no_rows_are_no_call(library: Library) -> None:
    given = operands(m=0)
    GEMM.by_cublaslt(library, given, empty(given))
    assert cublaslt_mm_op(*given).shape == (0, 32)


def test_what_the_library_cannot_do_is_an_error_that_says_what(library: Library) -> None:
    given = operands(formats=(E5M2, E5M2))
    with pytest.raises(CublasLtError, match="cublasLtMatmulAlgoGetHeuristic failed with status 15"):
        GEMM.by_cublaslt(library, given, empty(given))


def test_plans_are_given_back_when_many_shapes_were_multiplied(
    new_library: Callable[[ctypes.CDLL], Library], stand_in: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublaslt, "MOST_PLANS", 2)
    library = new_library(stand_in)
    objects = ctypes.c_int.in_dll(stand_in, "objects")
    objects.value = 0
    for m in (16, 32, 48, 16):
        given = operands(m=m)
        y = empty(given)
        GEMM.by_cublaslt(library, given, y)
        assert_rounded_once(y, given)
    assert objects.value == 2 * 5  # a description and four layouts each


def test_a_shape_without_a_kernel_is_asked_for_once_and_leaves_nothing_behind(
    library: Library, stand_in: ctypes.CDLL
) -> None:
    objects, asked = (ctypes.c_int.in_dll(stand_in, name) for name in ("objects", "asked"))
    objects.value = asked.value = 0
    given = operands(formats=(E5M2, E5M2))
    y = empty(given)  # one: how it is aligned is part of what is asked for
    for _ in range(2):
        with pytest.raises(CublasLtError, match="status 15"):
            GEMM.by_cublaslt(library, given, y)
    assert objects.value == 0 and asked.value == 1


def test_a_heuristic_that_finds_nothing_is_an_error_with_the_gemm(library: Library, stand_in: ctypes.CDLL) -> None:
    objects = ctypes.c_int.in_dll(stand_in, "objects")
    objects.value = 0
    given = operands(m=32, n=48, k=16, lies="MK")
    expected = (
        r"no kernel for 32x48x16, torch.float8_e4m3fn by torch.float8_e4m3fn to torch.bfloat16, strides "
        r"\(1, 32\) and \(1, 16\)"
    )
    with set_to(ctypes.c_int.in_dll(stand_in, "knows_any"), 0):
        with pytest.raises(CublasLtError, match=expected):
            GEMM.by_cublaslt(library, given, empty(given))
    assert objects.value == 0


def test_a_gemm_gets_the_workspace_that_its_algorithm_needs(library: Library, stand_in: ctypes.CDLL) -> None:
    needed = ctypes.c_int.in_dll(stand_in, "needed")
    for m, size in ((16, 0), (32, 5000), (48, 1000), (64, 70000)):
        given = operands(m=m)
        y = empty(given)
        with set_to(needed, size):
            GEMM.by_cublaslt(library, given, y)
        assert_rounded_once(y, given)


def test_a_plan_is_made_once_for_each_kind_of_gemm(library: Library, stand_in: ctypes.CDLL) -> None:
    """Shapes, strides, dtypes, alignment, a bias, a sum, the way of accumulating: each is another one."""
    asked = ctypes.c_int.in_dll(stand_in, "asked")
    asked.value = 0
    wide = torch.zeros(48, 80, dtype=torch.uint8).view(E4M3)
    cases = [
        *(operands(), operands(m=64), operands(n=48), operands(k=80), operands(fast=True), operands(bias=True)),
        *(operands(formats=(E5M2, E4M3)), operands(formats=(E4M3, E5M2)), operands(dtype=torch.float32)),
        *(operands(lies="MN"), operands(lies="KN"), operands(lies="MK"), operands()._replace(left=wide[:, :64])),
        operands()._replace(left=wide[:, 16:]),  # 16 bytes after an address that more divides
    ]
    given = [(one, empty(one)) for one in cases]
    aligned = [_aligned(one, y) for one, y in given]
    for _ in range(3):
        for one, y in aligned:
            GEMM.by_cublaslt(library, one, y)
    assert asked.value == len(cases)


def _aligned(given: Operands, y: Tensor) -> tuple[Operands, Tensor]:
    """The operands at addresses that 256 divides, unless they are part of something larger."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor._base is not None and not tensor._base.numel() == tensor.numel():
            return tensor
        raw = torch.empty(tensor.numel() * tensor.itemsize + 256, dtype=torch.uint8)
        raw = raw[-raw.data_ptr() % 256 :][: tensor.numel() * tensor.itemsize].view(tensor.dtype)
        new = raw.as_strided(tensor.shape, tensor.stride())
        new.view(torch.uint8).copy_(tensor.view(torch.uint8)) if new.itemsize == 1 else new.copy_(tensor)
        return new

    names = ("left", "right", "added", "bias")
    return given._replace(**{name: moved(getattr(given, name)) for name in names}), moved(y)


def test_a_gpu_that_reads_k_contiguous_operands_only_says_no_to_others(library: Library, stand_in: ctypes.CDLL) -> None:
    with set_to(ctypes.c_int.in_dll(stand_in, "any_layout"), 0):
        GEMM.by_cublaslt(library, operands(k=80), empty(operands(k=80)))
        given = operands(k=80, lies="MN")
        with pytest.raises(CublasLtError, match="status 15"):
            GEMM.by_cublaslt(library, given, empty(given))
        with pytest.raises(CublasLtError, match="status 15"):
            GEMM.check(library, torch.device("cpu"), any_layout=True)


def test_a_library_that_computes_wrongly_is_found_out_before_it_is_used(
    library: Library, stand_in: ctypes.CDLL
) -> None:
    GEMM.check(library, torch.device("cpu"), any_layout=True)
    with set_to(ctypes.c_float.in_dll(stand_in, "factor"), 0.5):
        with pytest.raises(CublasLtError, match="small FP8 gemm was wrong"):
            GEMM.check(library, torch.device("cpu"))


def test_a_gemm_is_one_call_of_compiled_code(stand_in: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    library = fastest(stand_in)
    assert isinstance(library, CompiledCublasLt)
    called, original = [], library._multiply
    monkeypatch.setattr(library, "_multiply", lambda *arguments: called.append(1) or original(*arguments))
    for given in (operands(), operands(bias=True), operands(added=False)):
        GEMM.by_cublaslt(library, given, empty(given))
    assert len(called) == 3


@pytest.mark.parametrize("error, words", [(NoCompiler(), "C"), (CompilationError("out of order"), "out of order")])
def test_without_a_compiler_that_works_gemms_are_called_from_python_and_a_warning_says_so(
    stand_in: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    words: str,
) -> None:
    def fails() -> str:
        raise error

    monkeypatch.setattr(cublaslt_compiled, "cpp_compiler", fails)
    monkeypatch.setattr(cublaslt_compiled, "_compiled", functools.cache(cublaslt_compiled._compiled.__wrapped__))
    with caplog.at_level(logging.WARNING, "fp8_compile"):
        libraries = [fastest(stand_in), fastest(stand_in)]
    assert [type(one) for one in libraries] == [CublasLt, CublasLt]
    (record,) = caplog.records
    assert words in record.getMessage() and "twice the host time" in record.getMessage()


def test_a_library_without_its_functions_is_refused(stand_in: ctypes.CDLL) -> None:
    with pytest.raises(CublasLtError, match="cublasLtCreate is not in the library"):
        fastest(ctypes.CDLL(None))


def test_without_the_library_a_warning_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    with pytest.warns(UserWarning, match="cuda:7: FP8 gemms copy operands and add residuals.*libcublasLt.so.0"):
        assert GEMM.library_of(7) is None
    cublaslt_op._open.cache_clear()
    GEMM._libraries.clear()


@pytest.mark.parametrize("lies", ["KK", "MN"])
def test_two_steps_give_the_sum_of_the_rounded_product(lies: str) -> None:
    given = operands(dtype=torch.float32, lies=lies)
    y = empty(given)
    GEMM.by_torch(given, y)
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
