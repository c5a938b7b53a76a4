"""A step of experts as generated for a B200, run in the interpreter: the numbers of groups as they are."""

from __future__ import annotations

import pytest
import torch
from compile_kernels import compile_kernels
from grouped import Layer, offsets_of
from interpreted_step import HEURISTIC_BLOCKS, compiled_for_gpu
from torch import Tensor

EXPERTS, K, N, TOKENS = 2, 128, 128, 2 * 128
GROUPS = [(200, 56), (0, 100)]


def step(compiled: torch.nn.Module, layer: Layer, x: Tensor, offsets: Tensor, dy: Tensor) -> list[Tensor]:
    layer.zero_grad()
    given = x.clone().requires_grad_()
    y = compiled(given, offsets)
    y.backward(dy)
    assert given.grad is not None and layer.experts.w.grad is not None
    return [y.detach(), given.grad, layer.experts.w.grad.clone()]


@pytest.fixture(scope="module")
def layer() -> Layer:
    torch.manual_seed(0)
    return Layer(EXPERTS, K, N, dtype=torch.bfloat16)


def test_a_step_gives_the_numbers_of_a_cpu_for_any_groups_without_another_compilation(layer: Layer) -> None:
    x, dy = torch.randn(TOKENS, K).bfloat16(), torch.randn(TOKENS, N).bfloat16()
    torch._dynamo.reset()
    on_cpu = torch.compile(layer, backend="fp8", options={"recipe": "mxfp8"}, fullgraph=True)
    expected = [step(on_cpu, layer, x, offsets_of(*sizes), dy) for sizes in GROUPS]
    with compiled_for_gpu(HEURISTIC_BLOCKS, 100) as graphs:
        on_gpu = torch.compile(layer, backend="fp8", options={"recipe": "mxfp8", "target": "cuda:100"}, fullgraph=True)
        found = [step(on_gpu, layer, x, offsets_of(*sizes), dy) for sizes in GROUPS]
    for sizes, one, other in zip(GROUPS, expected, found, strict=True):
        for wanted, actual in zip(one, other, strict=True):
            assert torch.equal(wanted, actual), sizes
    forward, backward = graphs
    assert forward.source.count("swizzled_mx_grouped_mm.default(") == 1
    assert backward.source.count("swizzled_mx_grouped_mm.default(") == 2
    compiled = [kernel for graph in graphs for kernel in compile_kernels(graph.source, every_config=False)]
    assert [kernel for kernel in compiled if kernel.spills or kernel.nan_clamps] == []
