"""The constants of a format are those of its table of values, and the table is torch's."""

from __future__ import annotations

import fp8_reference as reference
import numpy as np
import pytest
import torch

from fp8_compile.kernels.formats import BY_DTYPE, BY_NAME, format_of

each_format = pytest.mark.parametrize("expected", reference.FORMATS, ids=lambda format: format.name)


@each_format
def test_reference_table_agrees_with_torch_on_every_code(expected: reference.Fp8) -> None:
    decoded = torch.arange(256, dtype=torch.uint8).view(expected.dtype).double().numpy()
    np.testing.assert_array_equal(decoded, expected.values)  # treats NaN as equal to NaN


@each_format
def test_constants_are_those_of_the_table(expected: reference.Fp8) -> None:
    format = format_of(expected.dtype)
    assert format.max == expected.max == torch.finfo(expected.dtype).max
    assert format.significand_bits == expected.mantissa_bits + 1
    spacing = np.diff(expected.magnitudes)
    smallest_normal = expected.magnitudes[2**expected.mantissa_bits]
    assert 2.0**format.min_exponent == smallest_normal
    # What makes it the smallest normal number: the spacing is constant up to twice it, and doubles there.
    below_twice = expected.magnitudes[:-1] < 2 * smallest_normal
    assert set(spacing[below_twice]) == {smallest_normal * 2.0**-expected.mantissa_bits}
    assert spacing[2 * 2**expected.mantissa_bits] == 2 * spacing[0]


@each_format
def test_every_value_is_exact_in_bf16_and_fp32_so_that_the_cpu_may_multiply_there(expected: reference.Fp8) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(expected.dtype)
    for wider in (torch.bfloat16, torch.float32):
        assert torch.equal(values.to(wider).double().nan_to_num(), values.double().nan_to_num())


def test_names_stand_for_the_formats_of_nvidia_and_the_open_standard() -> None:
    assert {name: format.dtype for name, format in BY_NAME.items()} == {
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }
    assert [str(format) for format in BY_DTYPE.values()] == [expected.name for expected in reference.FORMATS]


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.float8_e8m0fnu])
def test_asking_for_the_format_of_another_dtype_says_what_was_expected(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"{dtype} is not an FP8 dtype; expected one of torch.float8_e4m3fn"):
        format_of(dtype)
