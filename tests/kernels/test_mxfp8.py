"""MXFP8's formulas against torchao's and against FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_compile.kernels import mxfp8
from fp8_compile.kernels.quantize import block_amax

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16)


def bytes_of(q: Tensor) -> Tensor:
    """Codes as integers, all NaNs alike."""
    codes = q.view(torch.uint8).to(torch.int32)
    return torch.where((codes & 0x7F) == 0x7F, 0x7F, codes)


def torchao_s(x: Tensor) -> tuple[Tensor, Tensor]:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    scale, q = mx.to_mx(x, E4M3, 32, mx.ScaleCalculationMode.RCEIL)
    return bytes_of(q), scale.view(torch.uint8).reshape(x.shape[0], x.shape[1] // 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e-30, 1e-35, 1e20, 1e30, 8e37])
def test_codes_and_scales_are_torchao_s(size: float, dtype: torch.dtype, generator) -> None:
    x = (torch.randn(64, 256, generator=generator) * size).clamp(-3e38, 3e38).to(dtype)
    x[3] = 0
    x[:, 32:64] *= 2.0**-20
    expected, expected_scale = torchao_s(x)
    q, scale = mxfp8.quantize_mx(x, (1, 32))
    assert torch.equal(scale, expected_scale)
    normal = (scale > 0).repeat_interleave(32, 1)  # the test below has the others
    assert torch.equal(bytes_of(q)[normal], expected[normal]) and normal.any()
    assert (q.float().abs() <= 448).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_below_the_smallest_scale_codes_are_kept_that_torchao_flushes(dtype: torch.dtype, generator) -> None:
    """A difference that docs/numerics.md names: where the byte is 0, torchao multiplies by 1 instead of 2**127."""
    x = (torch.randn(8, 64, generator=generator) * 1e-38).to(dtype)
    expected, expected_scale = torchao_s(x)
    q, scale = mxfp8.quantize_mx(x, (1, 32))
    assert torch.equal(scale, expected_scale) and not scale.any()
    assert not (expected & 0x7F).any() and (bytes_of(q) & 0x7F).any()
    # 2**-127 times E4M3: half of the last of four bits, or half of the smallest subnormal.
    error = (mxfp8.dequantize_mx(q, scale, (1, 32)) - x.float()).abs()
    assert (error <= torch.maximum(x.float().abs() / 16, torch.tensor(2.0**-137))).all()


def test_a_nan_is_torchao_s_and_an_inf_is_not_hidden() -> None:
    """A difference that docs/numerics.md names: torchao gives a block with an Inf the largest finite scale."""
    x = torch.ones(3, 64)
    x[0, 3], x[1, 40], x[2, 5] = torch.nan, torch.inf, -torch.inf
    _, theirs = torchao_s(x)
    for block in mxfp8.BLOCKS:
        q, scale = mxfp8.quantize_mx(x, block)
        assert torch.equal(scale == 255, ~block_amax(x, block).isfinite())
        assert torch.equal(mxfp8.dequantize_mx(q, scale, block).isfinite(), q.float().isfinite())
    assert theirs[0].tolist() == [255, 119] and theirs[1, 1] == 254
    assert mxfp8.quantize_mx(x, (1, 32))[1].tolist() == [[255, 119], [119, 255], [255, 119]]


def test_a_scale_is_the_smallest_power_of_two_that_saturates_nothing() -> None:
    """For every significand near a boundary, 448 times a power of two, and for others."""
    near = torch.arange(-64, 65) + torch.tensor(448.0).view(torch.int32)
    others = torch.arange(0, 2**23, 977) + torch.tensor(1.0).view(torch.int32)
    amax = torch.cat([near, others]).to(torch.int32).view(torch.float32)
    d = amax * (1.0 / 448.0)
    power = torch.exp2(mxfp8.e8m0_up(d).double() - 127)
    assert (power >= d.double()).all() and (power / 2 < d.double()).all()
    # The reciprocal of 448 is rounded: the byte differs from that of the quotient for no number at all.
    assert torch.equal(mxfp8.e8m0_up(d), mxfp8.e8m0_up(amax / 448.0))


def test_just_above_a_boundary_our_scale_does_not_saturate_where_torchao_s_does() -> None:
    """A difference that docs/numerics.md names: torchao rounds a logarithm in FP32."""
    x = torch.zeros(1, 32)
    x[0, 0] = torch.tensor(448.0 * 2.0**40).view(torch.int32).add(1).view(torch.float32)
    assert mxfp8.quantize_mx(x, (1, 32))[1].item() == 127 + 41
    assert torchao_s(x)[1].item() == 127 + 40
    assert torchao_s(x.bfloat16())[1].item() == mxfp8.quantize_mx(x.bfloat16(), (1, 32))[1].item() == 127 + 40


@pytest.mark.parametrize("byte", [0, 1, 2, 126, 127, 128, 253, 254])
def test_a_byte_stands_for_its_power_of_two(byte: int) -> None:
    power = mxfp8.power_of_e8m0(torch.tensor([byte], dtype=torch.int32))
    assert power.double().item() == 2.0 ** (byte - 127)
    assert mxfp8.e8m0_up(power).item() == byte
    assert mxfp8.power_of_e8m0(torch.tensor([255], dtype=torch.int32)).isnan().all()


def test_tiles_of_a_transpose_are_the_transposed_tiles(generator) -> None:
    x = torch.randn(70, 90, generator=generator)
    for block in mxfp8.BLOCKS:
        q, scale = mxfp8.quantize_mx(x, block)
        other, other_scale = mxfp8.quantize_mx(x.t(), block[::-1])
        assert torch.equal(bytes_of(q), bytes_of(other).t()) and torch.equal(scale, other_scale.t())


def test_the_product_is_that_of_the_dequantized_operands(generator) -> None:
    x, w = torch.randn(40, 100, generator=generator), torch.randn(50, 100, generator=generator)
    for block in ((1, 32), (32, 32)):
        (qx, sx), (qw, sw) = mxfp8.quantize_mx(x, (1, 32)), mxfp8.quantize_mx(w, block)
        exact = mxfp8.dequantize_mx(qx, sx, (1, 32)).double() @ mxfp8.dequantize_mx(qw, sw, block).double().t()
        for op in (mxfp8.mx_mm, mxfp8.mx_mm_op):
            y = op(qx, qw.t(), sx, sw.t(), None, torch.float32)
            assert (y - exact).norm() <= 1e-6 * exact.norm()
        # Rounding to four bits is a relative error of 2**-4 at most; of random ones 0.036 remains in the product.
        assert 0.01 < (y - x @ w.t()).norm() / (x @ w.t()).norm() < 0.05
