"""Additions that an FP8 gemm of an NVIDIA GPU makes itself."""

from __future__ import annotations

from collections.abc import Callable

import expecttest
import pytest
import torch
from graph_text import op_name, ops, render
from joint_graph import Split, apply, copy_graph, random_inputs, run, split
from torch import Tensor, fx, nn

from fp8_compile.passes.split.add_in_gemm import AddInGemm


class Block(nn.Module):
    """Two layers that read x, and one whose result is added to x."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 64, bias=bias), nn.Linear(32, 64, bias=bias)
        self.down = nn.Linear(64, 32, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.gate(x).relu() * self.up(x))


class One(nn.Module):
    """A layer, and something made of its result y and its input x."""

    def __init__(self, after: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(32, 32, bias=False), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.linear(x), x)


def halves(model: nn.Module, *, dtype: torch.dtype = torch.bfloat16, **options: object) -> Split:
    x = torch.randn(2, 8, 32, dtype=dtype, requires_grad=True)
    return split(model.to(dtype), x, target="cuda:90", **options)


def after_pass(graph: fx.Graph) -> tuple[fx.Graph, int]:
    done = copy_graph(graph)
    return done, apply(AddInGemm(), done)


def test_golden_of_a_block_with_a_residual() -> None:
    made = halves(Block())
    graphs = [after_pass(graph)[0] for graph in (made.forward, made.backward)]
    texts = [render(graph, lambda node: op_name(node) in ("_scaled_mm", "cublaslt_mm")) for graph in graphs]
    expecttest.assert_expected_inline("\n".join(texts), """\
_scaled_mm: bf16[16, 64] = _scaled_mm(to_2, to_5.T, add, add_1, fast_accum)
_scaled_mm_1: bf16[16, 64] = _scaled_mm(to_2, to_8.T, add, add_2, fast_accum)
cublaslt_mm: bf16[16, 32] = cublaslt_mm(to_11, to_14.T, add_3, add_4, view_4, None, fast_accumulation)
return view_5, primals_1, primals_3, primals_4, add, to_2, mul_3, add_1, _scaled_mm, mul_6, add_2, _scaled_mm_1,
    mul_10, add_3, mul_13, add_4

_scaled_mm: bf16[32, 64] = _scaled_mm(bitcast_1, bitcast_3.T, add, add_tensor_3)
_scaled_mm_1: bf16[16, 64] = _scaled_mm(to_2, bitcast_5.T, add, add_tensor_4)
_scaled_mm_2: bf16[64, 32] = _scaled_mm(bitcast_7, bitcast_9.T, add_1, add_tensor)
cublaslt_mm: bf16[16, 32] = cublaslt_mm(to_9, bitcast_11.T, add_1, add_tensor_2, view_6, None)
_scaled_mm_3: bf16[64, 32] = _scaled_mm(bitcast_13, bitcast_9.T, add_2, add_tensor)
cublaslt_mm_1: bf16[16, 32] = cublaslt_mm(to_14, bitcast_15.T, add_2, add_tensor_1, view_9, None)
return _scaled_mm_3, view_10, _scaled_mm_2, _scaled_mm
""")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "symbolic"])
def test_the_residual_and_the_sum_of_its_gradients_are_made_in_gemms(dtype: torch.dtype, dynamic: bool) -> None:
    made = halves(Block(bias=dtype is torch.bfloat16), dtype=dtype, dynamic=dynamic)
    for graph, expected_changes in ((made.forward, 1), (made.backward, 2)):
        after, changes = after_pass(graph)
        assert changes == ops(after)["cublaslt_mm"] == expected_changes
        assert ops(after)["_scaled_mm"] == ops(graph)["_scaled_mm"] - changes
        inputs = random_inputs(graph)
        for expected, actual in zip(run(graph, inputs), run(after, inputs), strict=True):
            if not isinstance(expected, Tensor):
                assert actual == expected
            elif expected.is_floating_point() and expected.itemsize > 1:
                assert actual.dtype == expected.dtype and actual.shape == expected.shape
                step = torch.finfo(dtype).eps
                torch.testing.assert_close(actual.double(), expected.double(), rtol=2 * step, atol=16 * step)


@pytest.mark.parametrize(
    "after",
    [
        lambda y, x: y + 1,
        lambda y, x: y + x.sum(0),  # another shape
        lambda y, x: torch.add(y, x, alpha=2),
        lambda y, x: y + y,
        lambda y, x: (y + x) * y,  # y itself is read, too
        lambda y, x: y + x.float(),  # another dtype
        lambda y, x: y + x.transpose(0, 1).reshape(8, 2, 32).transpose(0, 1).cos(),  # computed for this addition alone
        lambda y, x: y.relu() + x,
    ],
    ids=["a number", "a vector", "a multiple", "itself", "read twice", "FP32", "not in memory", "after a relu"],
)
def test_other_additions_stay(after: Callable[[Tensor, Tensor], Tensor]) -> None:
    graph = halves(One(after)).forward
    assert after_pass(graph)[1] == 0


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_gemms_with_many_scales_do_not_add(recipe: str) -> None:
    x = torch.randn(128, 32, dtype=torch.bfloat16, requires_grad=True)
    made = split(One(torch.add).bfloat16(), x, target="cuda:90", recipe=recipe)
    assert after_pass(made.forward)[1] == 0


def test_of_three_gradients_two_gemms_add() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x) for layer in self.layers)
            return q.sin() * k * v

    after, changes = after_pass(halves(Three()).backward)
    assert changes == ops(after)["cublaslt_mm"] == 2
