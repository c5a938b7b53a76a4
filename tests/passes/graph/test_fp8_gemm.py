"""Gemms that read operands as they are stored, where the GPU can; and what the other passes see of them."""

from __future__ import annotations

import functools

import expecttest
import pytest
import torch
from graph_text import op_name, ops, render
from joint_graph import (
    Split,
    apply,
    assert_gpu_accepts,
    assert_numbers,
    copy_graph,
    fp8_product,
    joint_graph,
    make,
    run_passes,
    split,
)
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config

from fp8_compile.passes.graph.emit import value
from fp8_compile.passes.graph.fp8_gemm import fp8_gemm
from fp8_compile.passes.graph.marks import mark_of
from fp8_compile.passes.split.add_in_gemm import AddInGemm
from fp8_compile.passes.split.drop_recompute_copies import DropRecomputeCopies
from fp8_compile.passes.split.relayout_bytes import RelayoutBytes

BF16 = torch.bfloat16
KEPT = ("relayout", "_scaled_mm", "cublaslt_mm")


class Mlp(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Transposed(nn.Module):
    """A layer whose weight is stored as [in, out], like those of GPT-2."""

    def __init__(self, activation: object = torch.neg) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 64)), nn.Parameter(torch.randn(64))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(torch.addmm(self.bias, x, self.weight))


def given(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@functools.cache  # nothing below changes them
def halves(width: int = 32, hidden: int = 64, tokens: int = 16, recipe: str = "delayed") -> Split:
    return split(Mlp(width, hidden).bfloat16(), given(tokens, width, dtype=BF16), target="cuda:100", recipe=recipe)


def finished(graph: fx.Graph) -> fx.Graph:
    done = copy_graph(graph)
    for one in (DropRecomputeCopies(), RelayoutBytes(), AddInGemm()):
        apply(one, done)
    return done


def test_golden_of_the_gemms_of_a_training_step() -> None:
    made = halves()
    graphs = [finished(graph) for graph in (made.forward, made.backward)]
    texts = [render(graph, lambda node: op_name(node) in KEPT) for graph in graphs]
    expecttest.assert_expected_inline("\n".join(texts), """\
_scaled_mm: bf16[16, 64] = _scaled_mm(to_2, to_5.T, view_1, view_3, fast_accum)
cublaslt_mm: bf16[16, 32] = cublaslt_mm(to_8, to_11.T, view_5, view_7, view_8, None, fast_accumulation)
return cublaslt_mm, primals_9, primals_10, primals_11, primals_12, primals_13, view_1, to_2, view_3, to_5,
    _scaled_mm, view_4, view_5, view_7, to_11

cublaslt_mm: bf16[32, 64] = cublaslt_mm(to_2.T, to_4, view_1, view_default_5, None, None)
cublaslt_mm_1: bf16[16, 64] = cublaslt_mm(to_2, convert_element_type_default_11, view_1, view_default_7, None, None)
cublaslt_mm_2: bf16[64, 32] = cublaslt_mm(to_7.T, convert_element_type_default_2, view_3, view_default_1, None,
    None)
cublaslt_mm_3: bf16[16, 32] = cublaslt_mm(to_7, convert_element_type_default_5, view_3, view_default_3, view_4,
    None)
return cublaslt_mm_2, cublaslt_mm_3, cublaslt_mm, None, None, None, None, None, None, None, None, None, None
""")


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_no_copy_is_made_in_either_half_and_gemms_are_known_by_their_matmuls(recipe: str) -> None:
    made = halves(recipe=recipe)
    sites = {row.node for row in made.report.rewritten}
    for graph in (made.forward, made.backward):
        after = finished(graph)
        assert not {"relayout", "clone", "bitwise_or"} & ops(after).keys()
        found = [node for node in after.nodes if fp8_gemm(node)]
        assert {mark_of(node).site for node in found} <= sites and len(found) == assert_gpu_accepts(after) > 0


def test_the_numbers_are_those_of_fp8_after_every_pass() -> None:
    steps = run_passes(joint_graph(nn.Linear(32, 64, bias=False), given(16, 32)), make("cuda:100"))
    assert assert_gpu_accepts(steps[-1].graph) == 3
    assert_numbers(steps, lambda w, x: fp8_product(x, w.T))


def test_a_weight_that_lies_the_other_way_is_read_so_with_a_bias_and_never_multiplied_twice() -> None:
    x = given(16, 32, dtype=BF16)
    steps = run_passes(joint_graph(Transposed().bfloat16(), x), make("cuda:100"))
    assert assert_gpu_accepts(steps[-1].graph) == 3
    assert_numbers(steps, lambda b, w, x: -(fp8_product(x, w) + b), tolerance=2.0**-7)
    output, grad_input, grad_weight = (node for node in steps[2].graph.nodes if fp8_gemm(node))
    assert [op_name(node) for node in (output, grad_input, grad_weight)] == ["cublaslt_mm", "_scaled_mm", "cublaslt_mm"]
    assert fp8_gemm(output).bias is not None and fp8_gemm(output).fast_accumulation
    # Made to recompute all that is cheap, the partitioner still takes no gemm for cheap.
    with functorch_config.patch(aggressive_recomputation=True):
        made = split(Transposed(torch.nn.functional.gelu).bfloat16(), x, target="cuda:100")
    assert len([node for node in made.backward.nodes if fp8_gemm(node)]) == 2


@pytest.mark.parametrize("options", [dict(tokens=20), dict(width=56)], ids=["rows filled up", "odd width"])
def test_copies_that_fill_up_sizes_or_have_odd_rows_stay_and_no_others(options: dict) -> None:
    after = finished(halves(**options).backward)
    copies = [node for node in after.nodes if op_name(node) == "relayout"]
    assert copies and all(copy.args[1:4] != (True, 1, 1) or value(copy.args[0]).shape[1] % 16 for copy in copies)
    assert assert_gpu_accepts(after) == 4


def test_an_operand_whose_rows_are_no_lines_of_16_bytes_is_copied_and_the_other_one_is_not() -> None:
    """[24, 64] @ [64, 32], both read across, but rows of 24 bytes can't be."""
    joint = joint_graph(lambda a, b: a.t() @ b, given(64, 24, dtype=BF16), given(64, 32, dtype=BF16), include=["b"])
    _, rewritten, *_ = steps = run_passes(joint, make("cuda:100"))
    output = next(node for node in rewritten.graph.nodes if fp8_gemm(node))
    left, right = (side.meta["val"] for side in output.args[:2])
    assert (left.stride(), right.stride()) == ((64, 1), (32, 1)) and op_name(output) == "cublaslt_mm"
    assert assert_gpu_accepts(steps[-1].graph) == 3


def test_gemms_with_many_scales_keep_their_copies() -> None:
    made = halves(recipe="rowwise")
    assert ops(made.backward)["_scaled_mm"] == 4 and "cublaslt_mm" not in ops(made.backward)


def test_a_gemm_of_the_models_own_is_none_of_ours() -> None:
    q, one = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(1, 1)
    joint = joint_graph(lambda x: x + torch._scaled_mm(q, q.t(), one, one, out_dtype=BF16), given(16, 16, dtype=BF16))
    assert ops(joint.graph)["_scaled_mm"] == 1 and not any(map(fp8_gemm, joint.graph.nodes))
