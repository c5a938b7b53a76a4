"""Gemms that read operands as they lie, where the GPU can."""

from __future__ import annotations

import expecttest
import pytest
import torch
from joint_graph import Split, apply, copy_graph, op_name, ops, random_inputs, render, run, split
from torch import Tensor, fx, nn

from fp8_compile import Target
from fp8_compile.passes.add_in_gemm import AddInGemm
from fp8_compile.passes.emit import value
from fp8_compile.passes.read_any_layout import ReadAnyLayout
from fp8_compile.passes.relayout_bytes import RelayoutBytes


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def backward_of(width: int = 32, hidden: int = 64, tokens: int = 16, **options: object) -> fx.Graph:
    x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    made: Split = split(Mlp(width, hidden).bfloat16(), x, target="cuda:100", **options)
    graph = copy_graph(made.backward)
    for one in (RelayoutBytes(), AddInGemm()):
        apply(one, graph)
    return graph


def after_pass(graph: fx.Graph) -> tuple[fx.Graph, int]:
    done = copy_graph(graph)
    return done, apply(ReadAnyLayout(), done)


def test_golden_of_the_gemms_of_a_backward_graph() -> None:
    before = backward_of()
    after, changes = after_pass(before)
    assert changes == 4 and ops(before)["relayout"] == 6 and "relayout" not in ops(after)
    kept = ("relayout", "_scaled_mm", "cublaslt_mm")
    expecttest.assert_expected_inline(render(after, lambda node: op_name(node) in kept), """\
cublaslt_mm: bf16[32, 64] = cublaslt_mm(to_2.T, to_4, add, add_tensor_2, None, None)
cublaslt_mm_1: bf16[16, 64] = cublaslt_mm(to_2, to_6, add, add_tensor_3, None, None)
cublaslt_mm_2: bf16[64, 32] = cublaslt_mm(to_9.T, convert_element_type_default_2, add_1, add_tensor, None, None)
cublaslt_mm_3: bf16[16, 32] = cublaslt_mm(to_9, to_11, add_1, add_tensor_1, view, None)
return cublaslt_mm_2, cublaslt_mm_3, cublaslt_mm
""")


def test_the_numbers_stay() -> None:
    before = backward_of()
    after, _ = after_pass(before)
    inputs = random_inputs(before)
    for expected, actual in zip(run(before, inputs), run(after, inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("options", [dict(tokens=20), dict(width=24)], ids=["rows filled up", "odd width"])
def test_copies_that_fill_up_sizes_or_have_odd_rows_stay(options: dict) -> None:
    before = backward_of(**options)
    after, _ = after_pass(before)
    copies = [node for node in after.nodes if op_name(node) == "relayout"]
    assert 0 < len(copies) <= ops(before)["relayout"]
    assert all(copy.args[1:4] != (True, 1, 1) or value(copy.args[0]).shape[1] % 16 for copy in copies)


def test_gemms_with_many_scales_keep_their_copies() -> None:
    before = backward_of(recipe="rowwise")
    assert ops(before)["_scaled_mm"] == 4 and after_pass(before)[1] == 0


def test_only_data_centre_blackwells_read_any_layout() -> None:
    names = ("cuda:89", "cuda:90", "cuda:100", "cuda:103", "cuda:120", "hip:gfx950", "cpu")
    assert [name for name in names if Target.parse(name).reads_any_layout] == ["cuda:100", "cuda:103"]
