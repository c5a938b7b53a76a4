"""An FP8 copy in a gemm's layout has the bytes of transpose and zero padding, whatever they stand for."""

from __future__ import annotations

import fp8_reference as reference
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from fp8_compile.kernels.relayout import relayout, relayout_op

dtypes = [format.dtype for format in reference.FORMATS]


def matrix_of_bytes(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes: NaNs, infinities, both zeros and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, cols), dtype=torch.uint8, generator=generator).view(dtype)


def expected_bytes(q: torch.Tensor, transposed: bool, row_multiple: int, col_multiple: int) -> np.ndarray:
    """Written with NumPy's own pad: rows and columns of zeros at the end."""
    data = q.view(torch.uint8).numpy()
    data = data.T if transposed else data
    missing = [(0, -size % multiple) for size, multiple in zip(data.shape, (row_multiple, col_multiple))]
    return np.pad(data, missing)


@pytest.mark.parametrize("run", [relayout, relayout_op], ids=["function", "op"])
@pytest.mark.parametrize("dtype", dtypes, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("multiples", [(1, 1), (16, 1), (1, 16), (16, 16), (1, 128)])
def test_every_byte_is_where_transpose_and_padding_put_it(run, dtype, transposed, multiples) -> None:
    q = torch.arange(256, dtype=torch.uint8).repeat(3)[: 19 * 37].reshape(19, 37).view(dtype)
    moved = run(q, transposed, *multiples)
    assert moved.dtype == dtype and moved.is_contiguous()
    np.testing.assert_array_equal(reference.codes_of(moved), expected_bytes(q, transposed, *multiples))


@hypothesis.given(
    rows=st.integers(0, 40),
    cols=st.integers(0, 40),
    dtype=st.sampled_from(dtypes),
    transposed=st.booleans(),
    multiples=st.tuples(*[st.sampled_from([1, 2, 16, 128])] * 2),
    layout=st.sampled_from(["contiguous", "transposed", "strided"]),
    seed=st.integers(0, 9),
)
def test_any_shape_stride_and_multiple_keeps_the_bytes(rows, cols, dtype, transposed, multiples, layout, seed) -> None:
    if layout == "contiguous":
        q = matrix_of_bytes(rows, cols, dtype, seed)
    elif layout == "transposed":
        q = matrix_of_bytes(cols, rows, dtype, seed).t()
    else:
        q = matrix_of_bytes(rows, 2 * cols, dtype, seed)[:, ::2]
    before = q.clone()
    moved = relayout_op(q, transposed, *multiples)
    assert moved.is_contiguous()
    np.testing.assert_array_equal(reference.codes_of(moved), expected_bytes(q, transposed, *multiples))
    assert torch.equal(q.view(torch.uint8), before.view(torch.uint8)), "the source is left as it was"


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (7, 5), (16, 16), (0, 5), (5, 0)])
@pytest.mark.parametrize("multiples", [(1, 1), (16, 16)])
def test_fake_result_has_the_shape_and_layout_of_the_real_one(shape, multiples) -> None:
    q = matrix_of_bytes(*shape, torch.float8_e4m3fn)
    for transposed in (False, True):
        real = relayout_op(q, transposed, *multiples)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = relayout_op(mode.from_tensor(q), transposed, *multiples)
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        assert fake.is_contiguous() and real.is_contiguous()


@pytest.mark.parametrize("run", [relayout, relayout_op], ids=["function", "op"])
@pytest.mark.parametrize("transposed", [False, True])
def test_of_a_stack_each_matrix_is_copied_by_itself(run, transposed) -> None:
    stack = matrix_of_bytes(3 * 7, 5, torch.float8_e4m3fn).view(3, 7, 5)
    moved = run(stack, transposed, 16, 1)
    assert moved.is_contiguous() and moved.shape == ((3, 16, 7) if transposed else (3, 16, 5))
    for one, copy in zip(stack, moved):
        np.testing.assert_array_equal(reference.codes_of(copy), expected_bytes(one, transposed, 16, 1))
    with torch._subclasses.FakeTensorMode() as mode:
        fake = relayout_op(mode.from_tensor(stack), transposed, 16, 1)
    assert fake.shape == moved.shape and fake.is_contiguous()


# The op's schema promises a new tensor: a caller, or a pass of torch's, may write into one and keep the other.
@pytest.mark.parametrize("shape, transposed", [((7, 5), False), ((1, 5), True), ((5, 1), True), ((7, 5), True)])
def test_result_never_shares_memory_with_the_source(shape, transposed) -> None:
    q = matrix_of_bytes(*shape, torch.float8_e4m3fn)
    shared = relayout_op(q, transposed, 1, 1).untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    assert not shared
