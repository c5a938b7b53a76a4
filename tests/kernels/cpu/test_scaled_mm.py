"""The FP8 gemm for CPUs against FP64, for every instruction set that this machine can run."""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import RUNNABLE, using
from torch import Tensor

from fp8_compile.kernels import scaled_mm as plain
from fp8_compile.kernels.cpu import scaled_mm
from fp8_compile.kernels.formats import E4M3, E5M2
from fp8_compile.kernels.quantize import spread

FORMATS = (E4M3.dtype, E5M2.dtype)
LAYOUTS = ("rows", "columns", "strided")
SCALES = ("tensor", "rows", "tiles")
SCALED_MM = scaled_mm.scaled_mm_op
LARGEST_ERROR = 1e-6  # of the whole result, by its norm


@pytest.fixture(params=RUNNABLE)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The gemm with the instructions of the parameter."""
    with using(request.param) as loaded:
        monkeypatch.setattr(scaled_mm, "library", lambda: loaded)  # of scaled_mm_add_
        yield request.param


def matrix(rows: int, cols: int, dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    """Random codes over the whole format, subnormals included, without NaN and Inf."""
    generator = torch.Generator().manual_seed(seed)
    shape = {"rows": (rows, cols), "columns": (cols, rows), "strided": (rows * 2, cols * 3)}[layout]
    magnitudes = 0x7E if dtype == E4M3.dtype else 0x7B
    codes = torch.randint(0, magnitudes + 1, shape, generator=generator) | (
        torch.randint(0, 2, shape, generator=generator) << 7
    )
    q = codes.to(torch.uint8).view(dtype)
    return {"rows": q, "columns": q.t(), "strided": q[::2, ::3]}[layout]


def scales_of(m: int, n: int, k: int, kind: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = math.ceil(k / 128)
    left = {"tensor": (1, 1), "rows": (m, 1), "tiles": (m, blocks)}[kind]
    right = {"tensor": (1, 1), "rows": (1, n), "tiles": (blocks, math.ceil(n / 128))}[kind]
    return tuple(torch.rand(shape, generator=generator) + 0.5 for shape in (left, right))  # type: ignore[return-value]


def exact(left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor) -> Tensor:
    """In FP64, by the definition."""

    def scaled(q: Tensor, scale: Tensor) -> Tensor:
        block = [1 if have == size else -1 if have == 1 else 128 for have, size in zip(scale.shape, q.shape)]
        if -1 not in block:
            return q.double() * spread(scale.double(), q.shape, block)
        for dim in (0, 1):
            if block[dim] == 128:
                scale = scale.repeat_interleave(128, dim).narrow(dim, 0, q.shape[dim])
        return q.double() * scale.double()

    return scaled(left, scale_left) @ scaled(right, scale_right)


def check(
    m: int, n: int, k: int, formats: tuple, layouts: tuple[str, str], kind: str, seed: int = 0, op=SCALED_MM
) -> Tensor:
    left, right = matrix(m, k, formats[0], layouts[0], seed), matrix(k, n, formats[1], layouts[1], seed + 1)
    scales = scales_of(m, n, k, kind, seed)
    y = op(left, right, *scales, None, torch.float32)
    expected = exact(left, right, *scales)
    assert y.shape == (m, n) and y.dtype == torch.float32
    # Where a sum cancels out there are no more digits than its terms have: its usual size counts then.
    usual = exact(left.double() ** 2, right.double() ** 2, *(scale**2 for scale in scales)).sqrt()
    assert (y - expected).norm() <= LARGEST_ERROR * max(expected.norm(), usual.norm())
    return y


@pytest.mark.parametrize("kind", SCALES)
def test_every_format_layout_and_scale_is_exact_but_for_the_sum(kernels: str, kind: str) -> None:
    for formats, layouts in itertools.product(itertools.product(FORMATS, FORMATS), itertools.product(LAYOUTS, LAYOUTS)):
        check(37, 45, 150, formats, layouts, kind)


@pytest.mark.parametrize(
    "m, n, k",
    [(1, 1, 1), (1, 70, 300), (4, 33, 97), (5, 31, 33), (12, 32, 32), (13, 33, 31), (33, 65, 129), (17, 40, 1100)],
)
def test_odd_sizes_need_no_padding(kernels: str, m: int, n: int, k: int) -> None:
    for layouts, kind in itertools.product((("rows", "columns"), ("columns", "rows")), SCALES):
        check(m, n, k, (E4M3.dtype, E5M2.dtype), layouts, kind)


def test_more_than_one_block_of_rows_columns_and_contraction(kernels: str) -> None:
    sizes = [(1300, 40, 300), (40, 2700, 300), (40, 1400, 2200)]
    if kernels == "amx_emulated":  # which is slow
        sizes = [(300, 70, 600), (70, 300, 600)]
    for layouts, (m, n, k), kind in itertools.product(
        (("rows", "columns"), ("columns", "rows")), sizes, ("rows", "tiles")
    ):
        check(m, n, k, FORMATS, layouts, kind)


def test_parts_of_threads_cover_odd_results_once(kernels: str) -> None:
    """Few tiles for many threads, and numbers of threads that divide in one way alone."""
    for (m, n), number in itertools.product([(13, 40), (300, 33), (5, 500)], (2, 3, 4, 7)):
        with threads(number):
            check(m, n, 2 * scaled_mm.GEMM_LEAST_PARALLEL // (m * n) + 33, FORMATS, ("rows", "rows"), "rows")


@settings(max_examples=60)
@given(
    st.integers(1, 80), st.integers(1, 80), st.integers(1, 300), st.tuples(*2 * [st.sampled_from(FORMATS)]),
    st.tuples(*2 * [st.sampled_from(LAYOUTS)]), st.sampled_from(SCALES), st.integers(0, 10**6),
)  # fmt: skip
def test_any_product_is_exact_but_for_the_sum(m, n, k, formats, layouts, kind, seed) -> None:
    check(m, n, k, formats, layouts, kind, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bias_output_dtypes_and_accumulation(kernels: str, dtype: torch.dtype) -> None:
    left, right = matrix(14, 50, E4M3.dtype, "rows", 1), matrix(50, 40, E4M3.dtype, "columns", 2)
    scales = (torch.full((1, 1), 2e-3), torch.full((1, 1), 1e-3))
    bias, start = torch.randn(40).to(dtype), torch.randn(14, 64).to(dtype)
    expected = exact(left, right, *scales) + bias.double()
    y = scaled_mm.scaled_mm_op(left, right, *scales, bias, dtype)
    close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, **close)
    out = start.clone()
    scaled_mm.scaled_mm_add_(out[:, 3:43], left, right, *scales, bias)
    torch.testing.assert_close(out[:, 3:43].double(), expected + start[:, 3:43].double(), **close)
    assert torch.equal(out[:, :3], start[:, :3]) and torch.equal(out[:, 43:], start[:, 43:])


def test_bf16_and_fp16_results_round_to_nearest_even_and_overflow_to_inf(kernels: str) -> None:
    """Against torch's own cast of the FP32 result, over magnitudes from FP16's subnormals to beyond its largest."""
    left = torch.ones(6, 16).to(E4M3.dtype)
    right = matrix(16, 64, E4M3.dtype, "rows", 3)
    scale_left = torch.tensor([1e-9, 3e-8, 1e-6, 1.0, 30.0, 1e3])[:, None]
    arguments = (left, right, scale_left, torch.rand(1, 64), None)
    whole = scaled_mm.scaled_mm_op(*arguments, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(scaled_mm.scaled_mm_op(*arguments, dtype), whole.to(dtype))


@pytest.mark.parametrize("m, n, k", [(0, 5, 7), (5, 0, 7), (0, 0, 0)])
def test_empty_results(kernels: str, m: int, n: int, k: int) -> None:
    one = torch.ones(1, 1)
    left, right = (torch.zeros(shape).to(E4M3.dtype) for shape in ((m, k), (k, n)))
    assert scaled_mm.scaled_mm_op(left, right, one, one, None, torch.float32).shape == (m, n)


def test_an_empty_sum_is_the_bias(kernels: str) -> None:
    one, bias = torch.ones(1, 1), torch.randn(40)
    left, right = torch.zeros(9, 0).to(E4M3.dtype), torch.zeros(0, 40).to(E4M3.dtype)
    y = scaled_mm.scaled_mm_op(left, right, one, one, bias, torch.float32)
    assert torch.equal(y, bias.expand(9, 40))


@pytest.mark.parametrize("rows", [1, 30])
def test_codes_and_scales_that_are_not_finite_reach_the_results_that_read_them(kernels: str, rows: int) -> None:
    one = torch.ones(1, 1)
    for dtype, bad in ((E4M3.dtype, math.nan), (E5M2.dtype, math.nan), (E5M2.dtype, math.inf)):
        left, right = torch.ones(rows, 70), torch.ones(70, 40)
        right[69, 7] = bad
        y = scaled_mm.scaled_mm_op(left.to(E4M3.dtype), right.to(dtype), one, one, None, torch.float32)
        y_columns = scaled_mm.scaled_mm_op(
            left.to(E4M3.dtype), right.t().contiguous().to(dtype).t(), one, one, None, torch.float32
        )
        for found in (y, y_columns):
            assert not found[:, 7].isfinite().any() and found[:, :7].isfinite().all() and found[:, 8:].isfinite().all()
    bad_scale = torch.ones(1, 40)
    bad_scale[0, 3] = math.nan
    y = scaled_mm.scaled_mm_op(
        torch.ones(rows, 8).to(E4M3.dtype), torch.ones(8, 40).to(E4M3.dtype), one, bad_scale, None, torch.float32
    )
    assert y[:, 3].isnan().all() and y.isnan().sum() == rows


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_results_are_bit_equal_whatever_the_number_of_threads(kernels: str) -> None:
    sizes = [(3, 500, 700), (130, 260, 100) if kernels == "amx_emulated" else (130, 260, 700)]
    for m, n, k in sizes:
        assert m * n * k >= scaled_mm.GEMM_LEAST_PARALLEL
        results = []
        for number in (1, 2, 3, 5):
            with threads(number):
                results.append(check(m, n, k, FORMATS, ("rows", "columns"), "tensor"))
        assert all(torch.equal(results[0], other) for other in results[1:])


def test_threads_of_the_caller_do_not_disturb_each_other() -> None:
    expected, found = check(130, 260, 700, FORMATS, ("rows", "columns"), "rows"), {}

    def work(index: int) -> None:
        found[index] = check(130, 260, 700, FORMATS, ("rows", "columns"), "rows")

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(found[index], expected) for index in range(4))


def test_a_forked_child_computes_instead_of_waiting_for_threads_that_are_gone() -> None:
    """Only the gemm: torch's own parallel operations do hang in such a child."""
    left, right = matrix(130, 700, E4M3.dtype, "rows", 0), matrix(700, 260, E4M3.dtype, "columns", 1)
    arguments = (left, right, *scales_of(130, 260, 700, "rows", 0), None, torch.float32)

    def product() -> bytes:
        return scaled_mm.scaled_mm_op(*arguments).numpy().tobytes()

    with threads(2):
        expected = product()
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=lambda: queue.put(product() == expected))
        child.start()
        child.join(30)
        child.kill()
        assert child.exitcode == 0 and queue.get()


@pytest.mark.parametrize("n", [1, 40, 512, 513, 2000])
def test_a_bias_of_any_dtype_size_and_stride_is_added_in_fp32(n: int) -> None:
    left, right = matrix(3, 20, E4M3.dtype, "rows", 1), matrix(20, n, E4M3.dtype, "columns", 2)
    arguments = left, right, torch.full((1, 1), 2e-3), torch.full((1, 1), 1e-3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for bias in (torch.randn(n).to(dtype), torch.randn(3 * n).to(dtype)[::3]):
            expected = scaled_mm.scaled_mm_op(*arguments, bias.float().contiguous(), torch.float32)
            assert torch.equal(scaled_mm.scaled_mm_op(*arguments, bias, torch.float32), expected)


def test_without_a_compiler_it_is_the_plain_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_mm, "library", lambda: None)
    y = check(9, 10, 140, FORMATS, ("rows", "columns"), "tiles", op=torch.ops.fp8_compile.scaled_mm_formula)
    assert y.isfinite().all()
    left, right = matrix(9, 20, E4M3.dtype, "rows", 1), matrix(20, 10, E4M3.dtype, "columns", 2)
    scales = scales_of(9, 10, 20, "rows", 0)
    out = torch.ones(9, 10)
    scaled_mm.scaled_mm_add_(out, left, right, *scales)
    assert torch.equal(out, 1 + plain.scaled_mm(left, right, *scales))


def test_accumulating_into_scattered_rows_is_refused() -> None:
    one, left, right = torch.ones(1, 1), torch.ones(4, 4).to(E4M3.dtype), torch.ones(4, 4).to(E4M3.dtype)
    with pytest.raises(RuntimeError, match="rows that are contiguous"):
        scaled_mm.scaled_mm_add_(torch.zeros(4, 8)[:, ::2], left, right, one, one)


def test_the_op_and_its_fake_agree() -> None:
    one = torch.ones(1, 1)
    left, right = matrix(6, 7, E5M2.dtype, "rows", 1), matrix(7, 5, E4M3.dtype, "columns", 2)
    for bias, dtype in ((None, torch.bfloat16), (torch.randn(5), torch.float32)):
        arguments = (left, right, one, one, bias, dtype)
        torch.library.opcheck(scaled_mm.scaled_mm_op, arguments, test_utils=("test_faketensor",))
