"""Every method of quantize_nvfp4: its format, its edge cases, and that it is as good as it says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8_compile import quantize_nvfp4
from fp8_compile.kernels.gpu import nvfp4_pack
from fp8_compile.kernels.nvfp4 import e2m1, scale_search, sweep
from fp8_compile.kernels.nvfp4.curvature import damped
from fp8_compile.kernels.nvfp4.hessian import own_scales, roots_of
from fp8_compile.kernels.nvfp4.quantize import METHODS, NEED_HESSIAN
from fp8_compile.kernels.nvfp4.weight import (
    SCALE_CODES,
    NVFP4Weight,
    block_scale_of,
    blocks_of,
    encode,
    with_global_scale,
)

each_method = pytest.mark.parametrize("method", METHODS)
SCALES = torch.tensor(SCALE_CODES, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def inputs(k: int, tokens: int = 512) -> torch.Tensor:
    """Tokens whose features are correlated and of very different sizes, as a transformer's are."""
    mixing = torch.randn(k, k) / k**0.5 + torch.eye(k)
    return torch.randn(tokens, k) @ (mixing * torch.linspace(0.2, 3, k)) + torch.randn(k)


def hessian_for(method: str, x: torch.Tensor) -> torch.Tensor | None:
    return x.t() @ x / len(x) if method in NEED_HESSIAN else None


def output_error(x: torch.Tensor, w: torch.Tensor, after: torch.Tensor) -> float:
    return float((x @ (after - w).t()).norm() / (x @ w.t()).norm())


def test_every_float_rounds_to_the_nearest_e2m1_value_and_a_tie_to_the_even_code() -> None:
    y = torch.cat([torch.linspace(-8, 8, 8001), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0])])
    grid = torch.tensor(e2m1.VALUES)
    distance = (y.abs().clamp(max=6)[:, None] - grid).abs()
    tied = distance == distance.amin(1, keepdim=True)
    code = torch.where(tied, torch.arange(8) % 2 + torch.arange(8) / 100, torch.inf).argmin(1)  # even codes first
    assert torch.equal(e2m1.codes_of(y), (code + 8 * y.signbit()).to(torch.uint8))
    assert torch.equal(e2m1.rounded(y), grid[code].copysign(y))
    assert torch.equal(e2m1.values_of(e2m1.codes_of(y)), e2m1.rounded(y))
    codes = torch.randint(0, 16, (3, 10), dtype=torch.uint8)
    assert torch.equal(e2m1.unpack(e2m1.pack(codes)), codes)
    assert torch.equal(e2m1.values_of_packed(e2m1.pack(codes)), e2m1.values_of(codes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rtn_is_bit_equal_to_torchao_and_to_the_gpu_kernels_reference(dtype: torch.dtype) -> None:
    from torchao.prototype.mx_formats.kernels import pack_uint4
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    w = (torch.randn(96, 272) * torch.rand(96, 1)).to(dtype)
    ours = quantize_nvfp4(w, "rtn")
    global_scale = w.float().abs().max() / (448.0 * 6.0)
    assert torch.equal(ours.global_scale, global_scale)
    scales, codes = nvfp4_quantize(w, 16, global_scale)
    assert scales.float().min() > 2**-6, "torchao's floor binds"
    assert torch.equal(ours.codes, codes.view(torch.uint8)) and torch.equal(ours.block_scales.float(), scales.float())
    reference, _ = nvfp4_pack.reference(w, global_scale)
    assert torch.equal(ours.codes, reference)
    nibbles = torch.randint(0, 16, (4, 32), dtype=torch.uint8)
    assert torch.equal(e2m1.pack(nibbles), pack_uint4(nibbles))


@given(seed=st.integers(0, 2**20), exponent=st.integers(-30, 30), tail=st.sampled_from([1.0, 3.0, 20.0]))
def test_sweep_finds_the_best_of_all_126_scales(seed: int, exponent: int, tail: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(8, 64, generator=generator) * 2.0**exponent
    w[:, ::7] *= tail
    ours = quantize_nvfp4(w, "sweep")
    x = sweep.columns_of(blocks_of(w, 16), ours.global_scale)
    every = torch.stack([(e2m1.rounded(x / s) * s - x).square().sum(0) for s in SCALES])
    error = ((ours.dequantize() - w) / ours.global_scale).reshape(-1, 16).square().sum(1)
    assert (error <= every.amin(0) * (1 + 1e-4) + 1e-9).all()


def test_the_hessian_sweep_starts_from_the_best_scale_of_each_block_by_itself() -> None:
    """The bounds of the search hold for it: no candidate that it leaves out is better."""
    w, x = torch.randn(24, 64), inputs(64)
    h = x.t() @ x / len(x)
    global_scale = quantize_nvfp4(w, "sweep").global_scale
    scales = own_scales(blocks_of(w, 16), global_scale, h)
    ours = NVFP4Weight(encode(blocks_of(w, 16), scales, global_scale), scales, global_scale, 64)
    roots, least = roots_of(h, 4)
    for block in range(4):
        part = slice(16 * block, 16 * block + 16)
        own = h[part, part].double()
        torch.testing.assert_close(roots[block].t().double() @ roots[block].double(), own, rtol=1e-4, atol=1e-4)
        assert 0 <= least[block] <= torch.linalg.eigvalsh(own)[0] * (1 + 1e-6)
        y = (w[:, part] / ours.global_scale).double()
        every = torch.stack([_quadratic(e2m1.rounded(y / s).double() * s - y, own) for s in SCALES])
        got = _quadratic(ours.dequantize()[:, part].double() / ours.global_scale - y, own)
        assert (got <= every.amin(0) * (1 + 1e-3)).all()


def _quadratic(e: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return ((e @ h) * e).sum(1)


@pytest.mark.parametrize("size", [16, 32])
def test_no_scale_is_better_than_the_one_that_the_hessian_sweep_gives_a_block_beside_the_others(size: int) -> None:
    """Against all 126 scales of every block, the others as they are, in FP64; and against each block by itself."""
    w, x = torch.randn(24, 96), inputs(96)
    w[3, size : 2 * size] = 0
    h = x.t() @ x / len(x)
    ours = quantize_nvfp4(w, "hessian", h, block_size=size)
    target, wide = (w / ours.global_scale).double(), h.double()
    error = ours.dequantize().double() / ours.global_scale - target
    got = _quadratic(error, wide)
    for block in range(96 // size):
        part = slice(size * block, size * block + size)
        for s in SCALES.double():
            other = error.clone()
            other[:, part] = e2m1.rounded((target[:, part] / s).float()).double() * s - target[:, part]
            assert (got <= _quadratic(other, wide) * (1 + 1e-4)).all()
    blocks = blocks_of(w, size)
    alone = own_scales(blocks, ours.global_scale, h)
    alone = NVFP4Weight(encode(blocks, alone, ours.global_scale), alone, ours.global_scale, 96).dequantize()
    before = _quadratic(alone.double() / ours.global_scale - target, wide)
    assert (got <= before * (1 + 1e-4)).all() and got.sum() < 0.9 * before.sum()


def test_better_methods_have_smaller_errors_on_tokens_they_have_not_seen() -> None:
    w, x = torch.randn(48, 128) * 0.05, inputs(128, 4096)
    seen, unseen = x[:3072], x[3072:]
    errors = {}
    for method in METHODS:
        packed = quantize_nvfp4(w, method, hessian_for(method, seen))
        errors[method] = output_error(unseen, w, packed.dequantize())
    assert errors["four_over_six"] < 0.97 * errors["rtn"]
    assert errors["sweep"] < 0.9 * errors["rtn"]
    assert errors["hessian"] < errors["sweep"]
    assert errors["admm"] < 0.99 * errors["hessian"]
    assert errors["gptq"] < 0.95 * errors["admm"]


def test_gptqs_choices_pay() -> None:
    w, x = torch.randn(40, 64), inputs(64, 2048)
    h = x.t() @ x / len(x)

    def error(**options: object) -> float:
        after = quantize_nvfp4(w, "gptq", h, **options).dequantize()
        return float(_quadratic((after - w).double(), damped(h, 0.01).double()).sum())

    greedy = error(passes=0, paths=1)
    assert greedy < error(passes=0, paths=1, candidates=(0, 0)), "searching the scale"
    assert error(passes=0) < greedy, "several ways"
    assert error(passes=2, paths=1) < greedy, "descent"
    assert error(passes=0, order="pivot") < error(passes=0, order="natural")
    assert error() < 0.97 * greedy


def least_errors(w: torch.Tensor, h: torch.Tensor, global_scale: torch.Tensor, coupled: int) -> torch.Tensor:
    """The least (q - w)^T H (q - w) that NVFP4 has for rows of one block, by trying everything: all 126 scales, and all
    codes of the first few weights; H couples no others, so that those are best rounded to nearest."""
    grid = torch.tensor((*e2m1.VALUES, *(-value for value in e2m1.VALUES[1:])), dtype=torch.float64)
    codes = torch.cartesian_prod(*[grid] * coupled)
    x, h = (w / global_scale).double(), h.double()
    least = []
    for s in SCALES.double():
        e = codes * s - x[:, None, :coupled]
        first = ((e @ h[:coupled, :coupled]) * e).sum(-1).amin(1)
        alone = e2m1.rounded((x[:, coupled:] / s).float()).double() * s - x[:, coupled:]
        least.append(first + (h.diagonal()[coupled:] * alone.square()).sum(1))
    return torch.stack(least).amin(0) * global_scale.double() ** 2


def test_gptq_and_admm_come_close_to_the_optimum_that_trying_everything_finds() -> None:
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(64, 16, generator=generator)
    mixed = torch.randn(64, 3, generator=generator) @ torch.randn(3, 3, generator=generator)
    h = torch.diag(torch.rand(16, generator=generator) + 0.5)
    h[:3, :3] = mixed.t() @ mixed / 64 + 0.05 * torch.eye(3)
    h = damped(h, 0.01)  # gptq adds as much again: of no account

    def errors(method: str) -> torch.Tensor:
        packed = quantize_nvfp4(w, method, h, **({"damping": 1e-6} if method == "gptq" else {}))
        return _quadratic((packed.dequantize() - w).double(), h.double())

    least = least_errors(w, h, quantize_nvfp4(w, "sweep").global_scale, 3)
    found = {method: errors(method) for method in NEED_HESSIAN}
    for method, error in found.items():
        assert (error >= least * (1 - 1e-5)).all(), method
    ratio = {method: float(error.sum() / least.sum()) for method, error in found.items()}
    assert 1 <= ratio["gptq"] < ratio["admm"] < ratio["hessian"], ratio
    assert ratio["gptq"] < 1.05, ratio
    assert (found["gptq"] <= least * (1 + 1e-5)).float().mean() > 0.75


def test_admm_is_never_worse_than_its_start_row_by_row() -> None:
    w, x = torch.randn(32, 48), inputs(48)
    h = x.t() @ x / len(x)
    start = _quadratic(quantize_nvfp4(w, "hessian", h).dequantize() - w, h)
    for rho in (1e-4, 0.02, 10.0):
        after = _quadratic(quantize_nvfp4(w, "admm", h, rho=rho, rounds=10).dequantize() - w, h)
        assert (after <= start * (1 + 1e-4)).all()


@each_method
def test_zeros_tiny_huge_and_odd_matrices(method: str) -> None:
    def quantized(w: torch.Tensor) -> torch.Tensor:
        packed = quantize_nvfp4(w, method, hessian_for(method, inputs(w.shape[1])))
        after = packed.dequantize()
        assert packed.codes.shape == (w.shape[0], -(-w.shape[1] // 16) * 8) and after.shape == w.shape
        assert after.isfinite().all() and packed.block_scales.float().isfinite().all()
        return after

    zeros = torch.randn(5, 40)
    zeros[1], zeros[:, 16:32] = 0, 0
    after = quantized(zeros)
    assert not after[1].any() and not after[:, 16:32].any() and after[0].any()
    assert not quantized(torch.zeros(3, 32)).any()
    assert (quantized(torch.ones(6, 40)) - 1).abs().amax() < 0.2
    assert quantize_nvfp4(torch.zeros(0, 32), method, hessian_for(method, inputs(32))).dequantize().shape == (0, 32)


@each_method
def test_a_power_of_two_changes_the_global_scale_alone_until_fp32_ends(method: str) -> None:
    w, h = (torch.randn(6, 40).clamp(-3, 3) * 256).round() / 256, hessian_for(method, inputs(40))
    w[0, 0] = 3.0
    usual = quantize_nvfp4(w, method, h)
    for exponent in (-115, -60, 60, 125):  # at -115 the global scale is just above 2**-126, the least normal number
        factor = 2.0**exponent
        packed = quantize_nvfp4(w * factor, method, h)
        assert torch.equal(packed.codes, usual.codes)
        assert torch.equal(packed.block_scales.float(), usual.block_scales.float())
        assert float(packed.global_scale) == float(usual.global_scale) * factor >= 2.0**-126
        exact = usual.dequantize().double() * factor
        lost = max(2.0**-150, 2.0**-24 * float(exact.abs().max()))  # by rounding the product with the global scale
        assert (packed.dequantize().double() - exact).abs().amax() <= lost
    # Below, the global scale stays at 2**-126, so that its inverse is finite, and block scales shrink instead. The
    # error is what that global scale, in proportion, gives an ordinary matrix, though 1 / (global * block scale)
    # exceeds FP32.
    tiny = quantize_nvfp4(w * 2.0**-130, method, h)
    assert float(tiny.global_scale) == 2.0**-126 and 1 / (2.0**-126 * float(tiny.block_scales.float().min())) > 2.0**128
    ordinary = quantize_nvfp4(w * 2.0**-10, method, h, global_scale=torch.tensor(2.0**-6))
    errors = [(q.dequantize().double() * 2.0**e - w).norm() for q, e in ((tiny, 130), (ordinary, 10))]
    torch.testing.assert_close(*errors, rtol=3e-2 if method == "admm" else 1e-3, atol=0)  # ties may fall otherwise
    if method != "admm":  # whose scales follow from its codes
        assert torch.equal(tiny.block_scales.float(), ordinary.block_scales.float())


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@each_method
def test_inf_and_nan_are_an_error_that_names_the_layer(method: str, bad: float) -> None:
    w = torch.ones(4, 32)
    w[2, 3] = bad
    with pytest.raises(ValueError, match=r"blocks\.0\.up: 1 of 128 weights are Inf or NaN"):
        quantize_nvfp4(w, method, hessian_for(method, torch.ones(4, 32)), name="blocks.0.up")


@each_method
def test_blocks_of_32_have_half_the_scales(method: str) -> None:
    w = torch.randn(16, 80)
    packed = quantize_nvfp4(w, method, hessian_for(method, inputs(80)), block_size=32)
    assert packed.block_size == 32 and packed.block_scales.shape == (16, 3) and packed.codes.shape == (16, 48)
    assert output_error(inputs(80), w, packed.dequantize()) < 0.25


def test_a_given_global_scale_is_used_and_block_scales_follow() -> None:
    w = torch.randn(8, 32)
    own = quantize_nvfp4(w, "sweep")
    shared = quantize_nvfp4(w, "sweep", global_scale=own.global_scale * 4)
    assert torch.equal(shared.global_scale, own.global_scale * 4)
    assert (shared.dequantize() - w).norm() < 1.05 * (own.dequantize() - w).norm()


def test_another_global_scale_gives_the_same_numbers_or_none() -> None:
    weight = quantize_nvfp4(torch.randn(8, 32), "rtn")
    for factor in (1.0, 2.0, 4.0):
        other = with_global_scale(weight, weight.global_scale * factor)
        assert other is not None and torch.equal(other.dequantize(), weight.dequantize())
        assert torch.equal(other.block_scales.float() * factor, weight.block_scales.float())
    for factor in (0.5, 2.0**16, 1.1):  # beyond 448, below the subnormals, between E4M3's numbers
        assert with_global_scale(weight, weight.global_scale * factor) is None


@pytest.mark.parametrize(
    "keywords, error, message",
    [
        ({"method": "gtpq"}, ValueError, r"did you mean 'gptq'"),
        ({"method": "gptq"}, ValueError, r"got no hessian; give hessian="),
        ({"method": "hessian", "hessian": torch.eye(8)}, ValueError, r"expects shape \(32, 32\).*got \(8, 8\)"),
        ({"method": "gptq", "hessian": torch.full((32, 32), torch.nan)}, ValueError, "the Hessian has Inf or NaN"),
        ({"method": "sweep", "block_size": 24}, ValueError, "expected 16"),
        ({"method": "sweep", "damping": 0.1}, ValueError, "has no option 'damping'"),
        ({"method": "gptq", "hessian": torch.eye(32), "order": "?"}, ValueError, "one of: pivot, energy, natural"),
        ({"method": "gptq", "hessian": torch.eye(32), "damping": 0}, ValueError, "damping expects a finite number"),
        ({"method": "gptq", "hessian": torch.eye(32), "paths": 0}, ValueError, "paths of 1 or more"),
        ({"method": "rtn", "global_scale": torch.zeros(())}, ValueError, "one finite number above 0"),
        ({"w": torch.ones(2, 2, 32)}, ValueError, r"matrix \[N, K\]"),
        ({"w": torch.ones(2, 32, dtype=torch.int32)}, TypeError, "float32, bfloat16 or float16"),
    ],
)
def test_wrong_arguments_say_what_was_expected(keywords: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize_nvfp4(**{"w": torch.randn(4, 32), **keywords})


def test_a_layer_that_only_saw_zeros_is_still_quantized() -> None:
    w = torch.randn(8, 32)
    for method in NEED_HESSIAN:
        after = quantize_nvfp4(w, method, torch.zeros(32, 32)).dequantize()
        assert (after - w).norm() < 0.2 * w.norm(), method


def test_the_start_of_a_search_is_kept_in_a_tie() -> None:
    x = torch.zeros(16, 3)
    start = block_scale_of(torch.tensor([1.0, 6.0, 60.0]), torch.ones(()))
    scales, error = scale_search.best_scales(x, start)
    assert torch.equal(scales.float(), start.float()) and not error.any()
