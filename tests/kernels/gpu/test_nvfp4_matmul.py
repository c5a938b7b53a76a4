"""nvfp4_matmul against its reference in the interpreter, its code for six GPUs; swizzled scales; FP4 by FP4."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from interpreted import check_same, interpreted
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from fp8_compile import quantize_nvfp4
from fp8_compile.kernels.gpu import nvfp4_matmul, nvfp4_pack, nvfp4_product, nvfp4_scales, tile
from fp8_compile.kernels.gpu.ahead_of_time import TARGETS, facts_of
from fp8_compile.kernels.gpu.catalogue import PRODUCTS
from fp8_compile.kernels.nvfp4 import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m, n, k, bias", [(1, 40, 32, False), (5, 33, 200, True), (40, 70, 144, True)])
def test_odd_shapes_are_as_near_the_reference_as_their_dtype_is(m, n, k, bias, dtype) -> None:
    weight = quantize_nvfp4(torch.randn(n, k) * 0.1)
    parts = weight.codes, weight.block_scales, weight.global_scale
    x = torch.randn(m, 2 * k)[:, ::2].to(dtype) if m == 1 else torch.randn(m, k).to(dtype)
    b = torch.randn(n).to(dtype) if bias else None
    with interpreted(nvfp4_matmul):
        y = nvfp4_matmul.nvfp4_matmul(x, *parts, b)
    exact = nvfp4_matmul.reference(x, *parts, b)
    assert y.dtype == dtype and y.shape == (m, n)
    torch.testing.assert_close(exact, ops.reference(x.double(), *parts, b), rtol=1e-6, atol=1e-6)
    error = (y.double() - exact).norm() / exact.norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


def test_every_code_and_scale_is_decoded_exactly() -> None:
    """x picks columns one by one: y is the weight, all 16 codes under all 126 scales."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(126, 1)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    with interpreted(nvfp4_matmul):
        y = nvfp4_matmul.nvfp4_matmul(torch.eye(16, dtype=torch.bfloat16), packed, scales, torch.ones(()))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = torch.cat([values, -values]) * scales.float()
    assert torch.equal(y.t().float(), expected)
    with interpreted(nvfp4_matmul, correct=False):  # the interpreter's own dot takes bf16 bits for integers
        y = nvfp4_matmul.nvfp4_matmul(torch.eye(16, dtype=torch.bfloat16), packed, scales, torch.ones(()))
    assert not torch.equal(y.t().float(), expected), "the correction of the interpreter is not needed any more"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_nothing_spills_and_products_run_on_tensor_cores(name: str, target: str) -> None:
    compiled = PRODUCTS[name]().compiled(target)
    assert facts_of(compiled).spills == 0
    if "matmul" in name:
        code = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
        assert re.search(r"mma\.sync|wgmma|tcgen05\.mma|v_mfma", code)
        widths = re.findall(r"tt\.addptr .*ptr<(?:bf16|i8)>>?, (?:tensor<[0-9x]+x)?(i\d+)>?", compiled.asm["ttir"])
        assert widths.count("i64") >= 3, "x, codes and y may have more than 2**31 elements"


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (200, 9)])
def test_swizzled_scales_are_torchaos_and_come_back(shape: tuple[int, int]) -> None:
    from torchao.prototype.mx_formats.utils import to_blocked

    scales = torch.randint(1, 127, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    swizzled = nvfp4_scales.swizzle(scales)
    assert torch.equal(swizzled.flatten().view(torch.uint8), to_blocked(scales.view(torch.uint8)).flatten())
    check_same(nvfp4_scales.unswizzle(swizzled, *shape), scales)
    codes = torch.zeros(shape[0], 8 * shape[1], dtype=torch.uint8)
    check_same(ops.to_standard(*ops.from_standard(codes, scales, "swizzled"), "swizzled")[1], scales)


@pytest.mark.parametrize("shape", [(3, 48), (130, 144)])
def test_the_pack_kernel_writes_swizzled_scales(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    scale = x.abs().max() / 2688
    with interpreted(nvfp4_pack, tile):
        codes, scales = nvfp4_pack.nvfp4_pack(x, scale, swizzled=True)
    expected, plain = nvfp4_pack.reference(x, scale)
    check_same(codes, expected)
    check_same(scales, nvfp4_scales.swizzle(plain))


def test_fp4_by_fp4_is_a_product_that_scaled_mm_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sm_100 is here: torch's own shape function checks operands and scales, and a decoder stands for the gemm."""
    weight, x = quantize_nvfp4(torch.randn(144, 64) * 0.1), torch.randn(24, 64, dtype=torch.bfloat16)
    swizzled, bias = nvfp4_scales.swizzle(weight.block_scales), torch.randn(144)

    def quantize(x: torch.Tensor, scale: torch.Tensor, swizzled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = nvfp4_pack.reference(x, scale)
        return codes, nvfp4_scales.swizzle(scales)

    def gemm(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype):
        described = [(one.shape, one.dtype) for one in (a, b.t(), scale_a, scale_b)]
        with FakeTensorMode():
            fakes = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in described]
            fake = meta(fakes[0], fakes[1].t(), *fakes[2:], out_dtype=out_dtype)
        sides = []
        for codes, scales in ((a, scale_a), (b.t(), scale_b)):
            codes = codes.view(torch.uint8)
            plain = nvfp4_scales.unswizzle(scales, codes.shape[0], codes.shape[1] // 8)
            sides.append(ops.dequantize_op(codes, plain, torch.ones(()), 2 * codes.shape[1], torch.float32, "standard"))
        result = (sides[0] @ sides[1].t()).to(out_dtype)
        assert fake.shape == result.shape and fake.dtype == out_dtype
        return result

    meta = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", gemm)
    y = nvfp4_product.fp4_by_fp4(x, weight.codes, swizzled, weight.global_scale, bias, quantize)
    parts = weight.codes, weight.block_scales, weight.global_scale
    expected = ops.reference(x.float(), *parts, bias, "nvfp4")
    assert (y.float() - expected).norm() / expected.norm() < 5e-3 and y.dtype == torch.bfloat16


def test_the_layout_and_the_activations_choose_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvfp4_product, "nvfp4_matmul", nvfp4_matmul.reference)
    weight, x = quantize_nvfp4(torch.randn(20, 40)), torch.randn(3, 40)
    parts = weight.codes, weight.block_scales, weight.global_scale
    for activations in (None, "int8", "nvfp4"):
        y = nvfp4_product.product(x, *parts, None, activations, "standard")
        torch.testing.assert_close(y.float(), ops.reference(x, *parts, None, activations))
    swizzled = weight.codes, nvfp4_scales.swizzle(weight.block_scales), weight.global_scale
    y = nvfp4_product.product(x, *swizzled, None, "nvfp4", "swizzled")
    torch.testing.assert_close(y.float(), ops.reference(x, *parts, None, "nvfp4"))  # FP32 has no FP4 gemm


@pytest.mark.parametrize("shape, by_tensor_cores", [((32, 64), True), ((20, 64), False), ((32, 48), False)])
def test_sizes_that_scaled_mm_refuses_are_left_to_the_weight_only_kernel(shape, by_tensor_cores, monkeypatch) -> None:
    weight, x = quantize_nvfp4(torch.randn(shape)), torch.randn(3, shape[1], dtype=torch.bfloat16)
    swizzled = weight.codes, nvfp4_scales.swizzle(weight.block_scales), weight.global_scale
    with FakeTensorMode(), torch.device("cuda"):
        left, right = (torch.empty(rows, shape[1] // 2, dtype=torch.float4_e2m1fn_x2) for rows in (3, shape[0]))
        padded = (nvfp4_scales.padded_shape(rows, shape[1] // 16) for rows in (3, shape[0]))
        scales = [torch.empty(size, dtype=torch.float8_e4m3fn).flatten() for size in padded]
        with contextlib.nullcontext() if by_tensor_cores else pytest.raises(RuntimeError, match="divisible by 16"):
            torch._scaled_mm(left, right.t(), *scales, out_dtype=torch.bfloat16)
    called: list[str] = []
    monkeypatch.setattr(nvfp4_product, "fp4_by_fp4", lambda *parts: called.append("FP4 by FP4"))
    monkeypatch.setattr(nvfp4_product, "nvfp4_matmul", lambda *parts: called.append("weight-only"))
    nvfp4_product.product(x, *swizzled, None, "nvfp4", "swizzled")
    assert called == ["FP4 by FP4" if by_tensor_cores else "weight-only"]


class NothingFromTheHost(TorchFunctionMode):
    """Refuses to make a tensor of the host's numbers, which waits for the device; of meta tensors none can be read."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert function not in (torch.tensor, torch.as_tensor, torch.from_numpy), function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("activations", ["int8", "nvfp4"])
@pytest.mark.parametrize("layout", [ops.STANDARD, ops.SWIZZLED])
def test_no_product_waits_for_the_device(activations: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU runs behind the host, which only a read of its memory or a copy to it stops."""
    asked = []

    def kernel(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        asked.append(x.device.type)
        return x

    monkeypatch.setattr(nvfp4_product, "nvfp4_matmul", kernel)
    with NothingFromTheHost(), torch.device("meta"):
        x, codes = torch.empty(8, 64, dtype=torch.float32), torch.empty(48, 32, dtype=torch.uint8)
        scales = torch.empty(48, 4, dtype=torch.float8_e4m3fn)
        scales = nvfp4_scales.swizzle(scales) if layout == ops.SWIZZLED else scales
        nvfp4_product.product(x, codes, scales, torch.empty(()), None, activations, layout)
    assert asked == ["meta"]
