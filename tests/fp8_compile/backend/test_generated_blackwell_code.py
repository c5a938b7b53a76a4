"""Steps in NVFP4 and MXFP8 as generated for Blackwell GPUs, run in the interpreter: the numbers of the CPU's code."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from compile_kernels import compile_kernels
from interpreted_step import HEURISTIC_BLOCKS, compiled_for_gpu
from torch import Tensor, nn

from fp8_compile.kernels.mxfp8 import dequantize_mx, quantize_mx
from fp8_compile.passes.joint import rewrite_block_scaled

TOKENS, WIDTH, HIDDEN = 40, 32, 48


class TwoLayers(nn.Module):
    """Whatever is quantized is an input, a weight, a gradient, or a result of a gemm: no kernel computes it otherwise
    than a CPU does. Tokens and HIDDEN are filled up with zeros; a bias and a residual are added."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


def _seed(x: Tensor) -> Tensor:
    return torch.full((1,), 2**40 + 5, dtype=torch.int64, device=x.device)


@functools.cache
def data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return TwoLayers(), torch.randn(TOKENS, WIDTH) * torch.randn(TOKENS, 1).exp(), torch.randn(TOKENS, WIDTH)


def steps(options: dict[str, Any], count: int = 2) -> list[dict[str, Tensor]]:
    original, x, gradient = data()
    model = copy.deepcopy(original)
    compiled = torch.compile(model, backend="fp8", options=options)
    results = []
    for _ in range(count):
        model.zero_grad()
        given = x.clone().requires_grad_()
        y = compiled(given)
        y.backward(gradient)
        assert given.grad is not None
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        results.append({"output": y.detach(), "x": given.grad, **gradients})
    return results


@functools.cache
def on_gpu(capability: int, **options: Any) -> tuple[list[dict[str, Tensor]], list[str]]:
    with compiled_for_gpu(HEURISTIC_BLOCKS, capability) as graphs:
        results = steps({**options, "target": f"cuda:{capability}"})
    return results, [graph.source for graph in graphs]


CASES = [
    (100, {"recipe": "nvfp4", "global_scale": "exact", "four_over_six": True}),
    (120, {"recipe": "nvfp4"}),
]


@pytest.fixture(autouse=True)
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs and GPUs draw other seeds; from the same one both round alike."""
    monkeypatch.setattr(rewrite_block_scaled, "_seed", _seed)


@pytest.mark.parametrize("capability, options", CASES, ids=str)
def test_a_step_gives_the_numbers_of_a_cpu(capability: int, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    expected = steps(options)
    actual, _ = on_gpu(capability, **options)
    for mine, its in zip(actual, expected, strict=True):
        for name in its:
            # Only sums in FP32 differ, in gemms and for the biases.
            assert (mine[name] - its[name]).norm() < 2e-6 * its[name].norm(), name


def test_every_kernel_of_a_step_compiles_without_spills() -> None:
    _, sources = on_gpu(120, **CASES[1][1])
    compiled = [kernel for source in sources for kernel in compile_kernels(source, every_config=False)]
    assert [kernel.name for kernel in compiled if kernel.spills or kernel.nan_clamps] == []
    assert all("nvfp4_tile.store_nvfp4(" in source for source in sources)


def _powers(x: Tensor, block: tuple[int, int]) -> Tensor:
    """x in blocks of 128 whose scales are powers of two."""
    filled = torch.nn.functional.pad(x, (0, -x.shape[1] % block[1], 0, -x.shape[0] % block[0]))
    return dequantize_mx(*quantize_mx(filled, block), block)[: x.shape[0], : x.shape[1]].double()


def test_blockwise_is_multiplied_in_mxfp8_with_scales_that_are_powers_of_two() -> None:
    torch.manual_seed(1)
    layer, x, gradient = nn.Linear(128, 112, bias=False), torch.randn(100, 128), torch.randn(100, 112)
    with compiled_for_gpu(HEURISTIC_BLOCKS, 100) as graphs:
        given = x.clone().requires_grad_()
        y = torch.compile(layer, backend="fp8", options={"recipe": "blockwise", "target": "cuda:100"})(given)
        y.backward(gradient)
    w = _powers(layer.weight.detach(), (128, 128))
    expected = {
        "output": (y.detach(), _powers(x, (1, 128)) @ w.t()),
        "grad_input": (given.grad, _powers(gradient, (1, 128)) @ w),
        "grad_weight": (layer.weight.grad, _powers(gradient, (128, 1)).t() @ _powers(x, (128, 1))),
    }
    for name, (actual, wanted) in expected.items():
        assert (actual - wanted).norm() < 1e-6 * wanted.norm(), name
    assert all("cublaslt_mx_mm" in graph.source for graph in graphs)
