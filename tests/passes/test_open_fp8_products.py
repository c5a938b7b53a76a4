"""Products with FP8 weights, opened: the same numbers, and nothing of ours left."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fp8_compile.kernels import fp8_weight
from fp8_compile.passes.open_fp8_products import OpenFp8Products


@pytest.mark.parametrize("with_bias", [True, False])
def test_opened_products_are_plain_and_equal_bit_for_bit(with_bias: bool) -> None:
    codes, scales = fp8_weight.quantize(torch.randn(24, 40))
    x, bias = torch.randn(5, 40, dtype=torch.bfloat16), torch.randn(24, dtype=torch.bfloat16)

    def products(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
        return fp8_weight.mm_op(x, codes, scales, bias if with_bias else None) * 2

    traced = make_fx(products, tracing_mode="fake")(x, codes, scales, bias)
    wanted = traced(x, codes, scales, bias)
    report = OpenFp8Products().run(traced.graph)
    traced.graph.lint()
    traced.recompile()
    assert report.changes == 1
    assert not [node for node in traced.graph.nodes if "fp8_compile" in str(node.target)]
    assert torch.equal(traced(x, codes, scales, bias), wanted)
