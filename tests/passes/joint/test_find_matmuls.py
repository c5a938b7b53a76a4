"""What each matmul of a joint graph is: whose, which of the three gemms, with which operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from joint_graph import JointGraph, joint_graph
from module_of import ModuleOf
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint
from unnamed import Unnamed

from fp8_compile.passes.graph.matmul import Matmul, OtherMatmul
from fp8_compile.passes.graph.roles import Origin, Role, is_backward
from fp8_compile.passes.graph.views import root_of
from fp8_compile.passes.joint.find_matmuls import find_matmuls

aten, prims = torch.ops.aten, torch.ops.prims
INPUT, WEIGHT, GRAD_OUTPUT = Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT
Function = Callable[[Tensor, Tensor, Tensor], Tensor]  # of x, w and b, see Weight
PARAMETER, GIVEN, GRADIENT = Origin.PARAMETER, Origin.INPUT, Origin.GRADIENT


def given(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def roles(joint: JointGraph) -> list[tuple[str, Role, Role]]:
    return [(site.gemm, site.left.role, site.right.role) for site in joint.matmuls()]


class Weight(nn.Module):
    """Calls a function on x, its parameter ``w`` and its buffer ``b``."""

    def __init__(self, function: Function, rows: int = 32, cols: int = 32) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(rows, cols))
        self.register_buffer("b", torch.randn(rows, cols))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w, self.b)


def test_a_linear_has_three_gemms_with_their_operands_in_order() -> None:
    output, grad_input, grad_weight = joint_graph(nn.Linear(32, 64), given(2, 8, 32)).matmuls()
    sites = [output, grad_input, grad_weight]
    assert [(site.op, site.gemm, site.shape) for site in sites] == [
        ("addmm", "output", (16, 64, 32)),
        ("mm", "grad_input", (16, 32, 64)),
        ("mm", "grad_weight", (64, 32, 16)),
    ]
    assert [(site.left.role, site.right.role) for site in sites] == [
        (INPUT, WEIGHT),
        (GRAD_OUTPUT, WEIGHT),
        (GRAD_OUTPUT, INPUT),
    ]
    assert [(site.left.origin, site.right.origin) for site in sites] == [
        (GIVEN, PARAMETER),
        (GRADIENT, PARAMETER),
        (GRADIENT, GIVEN),
    ]
    assert [(site.left.root.name, site.right.root.name) for site in sites] == [
        ("primals_3", "primals_1"),
        ("tangents_1", "primals_1"),
        ("tangents_1", "primals_3"),
    ]
    assert [site.weights for site in sites] == [("weight",)] * 3
    assert (output.added.name, output.alpha, output.beta) == ("primals_2", 1.0, 1.0)
    assert (output.batched, output.dtype, grad_input.added) == (False, torch.float32, None)


def test_backward_matmuls_are_linked_to_their_forward_one_by_sequence_number() -> None:
    joint = joint_graph(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), given(2, 8, 32))
    first, second, *backward = joint.matmuls()
    assert (first.forward, second.forward) == (None, None)
    assert [(site.module, site.forward) for site in backward] == [("2", second)] * 2 + [("0", first)] * 2
    for node in joint.graph.nodes:
        if is_backward(node):
            node.meta["seq_nr"] = -7
    assert [site.forward for site in joint.matmuls()] == [None] * 6


def test_a_backward_matmul_without_a_link_is_still_told_by_the_origin_of_its_operands() -> None:
    joint = joint_graph(nn.Linear(32, 64), given(8, 32))
    linked = roles(joint)
    for node in joint.graph.nodes:
        node.meta.pop("seq_nr", None)
    assert roles(joint) == linked
    assert {site.forward for site in joint.matmuls()} == {None}


def test_a_module_called_twice_keeps_its_two_calls_apart() -> None:
    twice = ModuleOf(lambda self, x: self.layer(torch.sin(self.layer(x))), layer=nn.Linear(32, 32, bias=False))
    first, second, *backward = joint_graph(twice, given(2, 8, 32)).matmuls()
    assert [(site.gemm, site.forward) for site in backward] == [
        ("grad_weight", second),
        ("grad_input", second),
        ("grad_weight", first),
        ("grad_input", first),
    ]
    assert {site.module for site in (first, second, *backward)} == {"layer"}
    assert second.left.origin == GIVEN | PARAMETER


def test_names_are_those_of_the_innermost_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    sites = joint_graph(Net(), given(2, 8, 32)).matmuls()
    assert [site.module for site in sites] == ["blocks.0.0", "blocks.1.0"] + ["blocks.1.0"] * 2 + ["blocks.0.0"] * 2
    assert all(site.weights == (f"{site.module}.weight",) for site in sites)


def test_a_weight_on_the_left_is_the_weight() -> None:
    joint = joint_graph(Weight(lambda x, w, b: w @ x, 64, 32), given(32, 8))
    assert roles(joint) == [
        ("output", WEIGHT, INPUT),
        ("grad_input", WEIGHT, GRAD_OUTPUT),
        ("grad_weight", GRAD_OUTPUT, INPUT),
    ]
    assert [site.weights for site in joint.matmuls()] == [("w",)] * 3


def test_of_two_inputs_the_right_one_is_the_weight() -> None:
    joint = joint_graph(torch.mm, given(8, 32), given(32, 16))
    assert roles(joint) == [
        ("output", INPUT, WEIGHT),
        ("grad_weight", INPUT, GRAD_OUTPUT),
        ("grad_input", GRAD_OUTPUT, WEIGHT),
    ]
    assert [(site.weights, site.module) for site in joint.matmuls()] == [((), "")] * 3


def test_a_tied_weight_is_found_behind_both_of_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.embed(tokens))

    joint = joint_graph(Tied(), torch.randint(0, 48, (2, 8)))
    both = ("embed.weight", "out.weight")
    assert [(site.gemm, site.module, site.weights) for site in joint.matmuls()] == [
        ("output", "out", both),
        ("grad_weight", "out", both),
        ("grad_input", "out", both),
    ]
    assert joint.matmuls()[0].left.origin == PARAMETER | GIVEN  # looked up in the same parameter


def test_a_matrix_times_its_own_transpose_is_linked_with_both_gradients() -> None:
    output, *backward = joint_graph(lambda x: x @ x.t(), given(32, 16)).matmuls()
    assert (output.left.role, output.right.role) == (INPUT, WEIGHT)
    assert [site.forward for site in backward] == [output, output]
    assert all(GRAD_OUTPUT in (site.left.role, site.right.role) for site in backward)


@pytest.mark.xfail(raises=AssertionError, reason="both operands have one root; the left one is taken")
def test_a_matrix_times_its_own_transpose_has_one_gradient_a_side() -> None:
    sites = joint_graph(lambda x: x @ x.t(), given(32, 16)).matmuls()
    assert sorted(site.gemm for site in sites) == ["grad_input", "grad_weight", "output"]


@pytest.mark.parametrize(
    "function, origin",
    [
        (lambda x, w, b: x @ w, PARAMETER),
        (lambda x, w, b: x @ b, Origin.BUFFER),
        (lambda x, w, b: x @ torch.ones(32, 32), Origin.CONSTANT),
        (lambda x, w, b: x @ (w * 2 + torch.ones(32, 32)), PARAMETER),
        (lambda x, w, b: x @ (w * b), PARAMETER | Origin.BUFFER),
        (lambda x, w, b: x @ (w + x.sum()), PARAMETER | GIVEN),
    ],
)
def test_the_origin_of_an_operand_is_all_it_is_computed_from(function: Function, origin: Origin) -> None:
    output = joint_graph(Weight(function), torch.randn(8, 32)).matmuls()[0]
    assert (output.left.origin, output.right.origin) == (GIVEN, origin)


def test_a_weight_computed_from_parameters_and_buffers_is_the_weight_on_either_side() -> None:
    masked = joint_graph(Weight(lambda x, w, b: (w * b) @ x), given(32, 8))
    assert roles(masked)[0] == ("output", WEIGHT, INPUT)
    assert {site.weights for site in masked.matmuls()} == {("w",)}
    flowing = joint_graph(Weight(lambda x, w, b: (w * x.sum()) @ x), given(32, 8))
    assert roles(flowing)[0] == ("output", INPUT, WEIGHT)


def test_slices_of_a_parameter_chosen_by_data_are_gathered_weights() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 32, 16))

        def forward(self, x: Tensor, expert: Tensor) -> Tensor:
            return torch.bmm(x, self.w[expert])

    output, *backward = joint_graph(Experts(), given(3, 8, 32), torch.tensor([0, 2, 1])).matmuls()
    assert (output.left.gathered, output.right.gathered) == (False, True)
    assert (output.left.role, output.right.role) == (INPUT, WEIGHT)
    assert sorted(site.gemm for site in backward) == ["grad_input", "grad_weight"]


def test_a_symbolic_size_is_no_origin() -> None:
    joint = joint_graph(Weight(lambda x, w, b: x @ (w * x.shape[0])), torch.randn(8, 32), dynamic=True)
    assert joint.matmuls()[0].right.origin == PARAMETER


def test_scale_and_sum_of_a_fused_product_are_read() -> None:
    def product(a: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.baddbmm(a, x, w, beta=0.5, alpha=2)

    output, *backward = joint_graph(product, given(2, 8, 16), given(2, 8, 32), given(2, 32, 16)).matmuls()
    assert (output.op, output.added.name, output.alpha, output.beta) == ("baddbmm", "primals_1", 2, 0.5)
    assert (output.shape, output.batched) == ((2, 8, 16, 32), True)
    assert sorted(site.gemm for site in backward) == ["grad_input", "grad_weight"]


def test_einsum_is_found_as_the_product_it_becomes() -> None:
    joint = joint_graph(lambda x, w: torch.einsum("bti,io->bto", x, w), given(2, 8, 32), given(32, 16))
    assert sorted(site.gemm for site in joint.matmuls()) == ["grad_input", "grad_weight", "output"]
    assert joint.matmuls()[0].shape == (1, 16, 16, 32)


def test_fused_attention_has_a_row_forward_and_backward() -> None:
    def attention(self: ModuleOf, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 8, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)

    sites = joint_graph(ModuleOf(attention, qkv=nn.Linear(32, 96)), given(2, 8, 32)).matmuls()
    others = [site for site in sites if isinstance(site, OtherMatmul)]
    assert [(site.gemm, site.shape) for site in others] == [("output", (2, 2, 8, 16)), ("grad_input", (2, 2, 8, 16))]
    assert {site.reason for site in others} == {"attention kernel: activation by activation stays in high precision"}
    assert all(site.op.startswith("_scaled_dot_product") for site in others)
    linear = [site for site in sites if isinstance(site, Matmul)]
    assert [(site.module, site.gemm) for site in linear] == [
        ("qkv", "output"),
        ("qkv", "grad_input"),
        ("qkv", "grad_weight"),
    ]


def test_inference_has_only_outputs() -> None:
    with torch.no_grad():
        joint = joint_graph(nn.Linear(32, 64), torch.randn(8, 32))
    assert [(site.gemm, site.weights) for site in joint.matmuls()] == [("output", ("weight",))]


def test_an_input_without_gradient_has_no_grad_input() -> None:
    joint = joint_graph(nn.Linear(32, 64), torch.randn(8, 32))
    assert [site.gemm for site in joint.matmuls()] == ["output", "grad_weight"]


def test_a_cast_by_autocast_is_looked_through() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        joint = joint_graph(nn.Linear(32, 64), given(8, 32))
    for site in joint.matmuls():
        assert isinstance(site, Matmul)
        assert (site.dtype, site.weights) == (torch.bfloat16, ("weight",))
    assert joint.matmuls()[0].right.root.name == "primals_1"


def test_a_checkpointed_matmul_is_found_once() -> None:
    def region(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda x, w: torch.sin(x @ w), x, w, use_reentrant=False)

    sites = joint_graph(region, given(8, 32), given(32, 32)).matmuls()
    assert [(site.gemm, site.forward and site.forward.gemm) for site in sites] == [
        ("output", None),
        ("grad_weight", "output"),
        ("grad_input", "output"),
    ]


def graph_with(op: Any, *shapes: tuple[int, ...], result: tuple[int, ...]) -> fx.Graph:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(len(shapes))]
    for node, shape in zip(inputs, shapes):
        node.meta["val"] = torch.empty(shape, device="meta")
    node = graph.call_function(op, tuple(inputs))
    node.meta["val"] = torch.empty(result, device="meta")
    graph.output([node])
    return graph


@pytest.mark.parametrize(
    "op, shapes, result, reason",
    [
        (aten._int_mm.default, ((32, 16), (16, 32)), (32, 32), "integer matmul"),
        (aten._scaled_mm.default, ((32, 16), (16, 32)), (32, 32), "the model's own FP8 matmul"),
    ],
)
def test_products_in_another_form_have_a_row_with_a_reason(op: Any, shapes: Any, result: Any, reason: str) -> None:
    (site,) = find_matmuls(graph_with(op, *shapes, result=result), Unnamed())
    assert isinstance(site, OtherMatmul)
    assert (site.op, site.gemm, site.reason, site.shape) == (op._schema.name[6:], "output", reason, result)


@pytest.mark.xfail(raises=AssertionError, reason="no row: neither a matmul nor known as one left alone")
@pytest.mark.parametrize(
    "op, shapes, result",
    [
        (aten.mm.dtype, ((32, 16), (16, 32)), (32, 32)),
        (aten.bmm.dtype, ((2, 32, 16), (2, 16, 32)), (2, 32, 32)),
        (aten._trilinear.default, ((8, 1, 32), (1, 16, 32), (8, 1, 32)), (8, 16)),  # nn.Bilinear
        (aten._scaled_mm_v2.default, ((32, 16), (16, 32)), (32, 32)),
    ],
)
def test_no_product_is_without_a_row(op: Any, shapes: Any, result: Any) -> None:
    assert len(find_matmuls(graph_with(op, *shapes, result=result), Unnamed())) == 1


def test_root_of_stops_at_the_first_op_that_mixes_elements() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    added = graph.call_function(aten.add.Tensor, (x, 1))
    viewed = graph.call_function(aten.view.default, (added, [4, 4]))
    cast = graph.call_function(prims.convert_element_type.default, (viewed, torch.bfloat16))
    turned = graph.call_function(aten.permute.default, (cast, [1, 0]))
    assert [root_of(node) for node in (x, added, turned)] == [x, added, added]
