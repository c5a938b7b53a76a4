"""Every reason for and against a rewrite, on matmuls made by hand: no graph is traced."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from joint_graph import joint_graph, make
from module_of import ModuleOf
from torch import Tensor, fx, nn

from fp8_compile.kernels.formats import E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ
from fp8_compile.passes.graph.matmul import Matmul, Operand
from fp8_compile.passes.graph.roles import Origin, Role
from fp8_compile.passes.graph.row import Gemm
from fp8_compile.passes.graph.rules import Rules
from fp8_compile.passes.joint.decide import MOST_SLICES, OperandPlan, Rewrite, Skip, decide, token_dim

INPUT, WEIGHT, GRAD_OUTPUT = Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT
CPU, H100 = make("cpu"), make("cuda:90")
WHOLE = (-1, -1)


def placeholder(*shape: int, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return node


def computed(*shape: int) -> fx.Node:
    node = fx.Graph().call_function(torch.ops.aten.sin.default, ())
    node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return node


def operand(node: fx.Node, role: Role, origin: Origin) -> Operand:
    return Operand(node, role, origin, root=node)


def linear(m: int, n: int, k: int, gemm: Gemm = "output", dtype: torch.dtype = torch.bfloat16) -> Matmul:
    """One of the gemms of a layer ``y[m, n] = x[m, k] @ w[k, n]``; for the backward ones M, N, K are their own."""
    roles = {"output": (INPUT, WEIGHT), "grad_input": (GRAD_OUTPUT, WEIGHT), "grad_weight": (INPUT, GRAD_OUTPUT)}[gemm]
    origins = {INPUT: Origin.INPUT, WEIGHT: Origin.PARAMETER, GRAD_OUTPUT: Origin.GRADIENT}
    nodes = placeholder(m, k, dtype=dtype), placeholder(k, n, dtype=dtype)
    left, right = (operand(node, role, origins[role]) for node, role in zip(nodes, roles))
    site = Matmul(nodes[0], "mm", "layer", gemm, left, right, weights=("layer.weight", "tied.weight"))
    return site if gemm == "output" else dataclasses.replace(site, forward=linear(m, n, k))


def product(left: Origin, right: Origin, *, came_in: bool, batch: int | None = None) -> Matmul:
    """``left @ right`` in forward, of tensors with these origins; those that came in are placeholders."""
    make_node = placeholder if came_in else computed
    shapes = ((32, 32), (32, 32)) if batch is None else ((batch, 32, 32), (batch, 32, 32))
    nodes = [make_node(*shape) for shape in shapes]
    op = "mm" if batch is None else "bmm"
    return Matmul(nodes[0], op, "", "output", operand(nodes[0], INPUT, left), operand(nodes[1], WEIGHT, right))


def reason(site: Matmul, rules: Rules) -> str:
    decision = decide(site, rules)
    assert isinstance(decision, Skip), f"expected a skip, got {decision}"
    return decision.reason


def rewrite(site: Matmul, rules: Rules) -> Rewrite:
    decision = decide(site, rules)
    assert isinstance(decision, Rewrite), f"expected a rewrite, got {decision}"
    return decision


# Names


def test_an_excluded_layer_is_skipped_with_the_reason_of_the_selection() -> None:
    asked: list[tuple[str, tuple[str, ...]]] = []

    def excluded(module: str, weights: tuple[str, ...]) -> str:
        asked.append((module, weights))
        return "excluded by 'layer'"

    assert reason(linear(32, 32, 32), dataclasses.replace(CPU, excluded=excluded)) == "excluded by 'layer'"
    assert asked == [("layer", ("layer.weight", "tied.weight"))]


@pytest.mark.parametrize("gemm", ["output", "grad_input", "grad_weight"])
def test_exclusion_holds_for_all_three_gemms(gemm: Gemm) -> None:
    rules = dataclasses.replace(CPU, excluded=lambda module, weights: "no")
    assert reason(linear(32, 32, 32, gemm), rules) == "no"


def test_the_first_reason_against_is_the_one_reported() -> None:
    rules = dataclasses.replace(CPU, excluded=lambda module, weights: "excluded", recipe_supported=False)
    tiny_and_double = linear(1, 1, 1, dtype=torch.float64)
    assert reason(tiny_and_double, rules) == "excluded"
    rules = dataclasses.replace(rules, excluded=CPU.excluded)
    assert reason(tiny_and_double, rules).startswith("dtype float64")
    assert reason(linear(1, 1, 1), rules) == "cpu has no tensorwise FP8 gemm"
    assert reason(linear(1, 1, 1), CPU) == "N=1 is below min_dim=16"


# Operands


def test_a_product_with_a_parameter_is_rewritten_on_either_side() -> None:
    activation = Origin.INPUT | Origin.PARAMETER
    rewrite(product(activation, Origin.PARAMETER, came_in=False), CPU)
    rewrite(product(Origin.PARAMETER, activation, came_in=False), CPU)
    rewrite(product(activation, Origin.PARAMETER, came_in=False, batch=4), CPU)
    masked = Origin.PARAMETER | Origin.BUFFER
    rewrite(product(activation, masked, came_in=False), CPU)


@pytest.mark.parametrize("origin", [Origin.BUFFER, Origin.CONSTANT])
def test_a_product_with_a_buffer_or_a_constant_is_skipped(origin: Origin) -> None:
    expected = "product with a buffer or a constant, not with a parameter"
    assert reason(product(Origin.INPUT, origin, came_in=True), CPU) == expected
    assert reason(product(origin, Origin.INPUT, came_in=True), CPU) == expected


@pytest.mark.parametrize("batch", [None, 1, 4])
def test_activation_by_activation_is_skipped(batch: int | None) -> None:
    activation = Origin.INPUT | Origin.PARAMETER
    expected = "activation by activation stays in high precision"
    assert reason(product(activation, activation, came_in=False, batch=batch), CPU) == expected


def test_a_product_of_tensors_that_came_in_is_skipped_and_a_plain_one_says_what_a_weight_is() -> None:
    expected = "activation by activation stays in high precision"
    remedy = " (a weight is a parameter, or a buffer or argument that include names)"
    for batch, text in ((None, expected + remedy), (1, expected), (2, expected)):
        assert reason(product(Origin.INPUT, Origin.INPUT, came_in=True, batch=batch), CPU) == text


@pytest.mark.parametrize("other", [Origin.PARAMETER, Origin.BUFFER, Origin.CONSTANT])
def test_a_product_that_makes_a_weight_is_skipped_with_its_gradients(other: Origin) -> None:
    made = dataclasses.replace(product(other, Origin.PARAMETER, came_in=True), makes_weight=True)
    gradient = dataclasses.replace(linear(32, 32, 32, "grad_weight"), forward=made, makes_weight=True)
    for site in (made, gradient):
        assert reason(site, CPU) == "makes a weight: what is computed from parameters alone stays in high precision"


def test_weights_gathered_by_data_are_skipped() -> None:
    site = product(Origin.INPUT, Origin.INPUT | Origin.PARAMETER, came_in=False, batch=4)
    gathered = dataclasses.replace(site, right=dataclasses.replace(site.right, gathered=True))
    assert reason(gathered, CPU) == "gathered weights: as many products as tokens"


def test_a_backward_matmul_is_judged_by_the_operands_of_its_forward_one() -> None:
    attention = product(Origin.INPUT, Origin.INPUT, came_in=True, batch=2)
    layer = linear(32, 32, 32)
    backward = dataclasses.replace(linear(32, 32, 32, "grad_input"), forward=attention)
    assert reason(backward, CPU) == "activation by activation stays in high precision"
    rewrite(dataclasses.replace(backward, forward=layer), CPU)


def test_a_backward_matmul_without_a_forward_one_is_judged_by_what_is_not_the_gradient() -> None:
    with_weight = dataclasses.replace(linear(32, 32, 32, "grad_input"), forward=None)
    rewrite(with_weight, CPU)
    node = computed(32, 32)
    other = operand(node, INPUT, Origin.INPUT | Origin.PARAMETER)
    expected = "activation by activation stays in high precision"
    assert reason(dataclasses.replace(with_weight, gemm="grad_weight", right=other), CPU) == expected


# Dtypes, recipes, roles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_of_32_and_16_bits_are_rewritten(dtype: torch.dtype) -> None:
    rewrite(linear(32, 32, 32, dtype=dtype), CPU)


@pytest.mark.parametrize("name", ["float64", "int8", "complex64"])
def test_other_dtypes_are_skipped_by_name(name: str) -> None:
    expected = f"dtype {name}: expected float32, bfloat16 or float16"
    assert reason(linear(32, 32, 32, dtype=getattr(torch, name)), CPU) == expected


def test_a_recipe_that_the_target_has_no_gemm_for_is_skipped() -> None:
    assert reason(linear(128, 128, 128), make("cuda:89", recipe="blockwise")) == "cuda:89 has no blockwise FP8 gemm"
    assert reason(linear(128, 128, 128), make("hip:gfx942", recipe="blockwise")) == (
        "hip:gfx942 has no blockwise FP8 gemm"
    )
    for target in ("cpu", "cuda:90", "cuda:100", "cuda:120"):
        rewrite(linear(128, 128, 128), make(target, recipe="blockwise"))


def test_blocks_that_are_multiplied_in_mxfp8_are_of_e4m3_and_rounded_to_nearest() -> None:
    rules = make("cuda:100", recipe="blockwise", backward_format="e5m2")
    assert "blocks of e4m3 only" in reason(linear(128, 128, 128), rules)
    rules = make("cuda:100", recipe="blockwise", stochastic_rounding=True)
    assert "no stochastic rounding of blocks" in reason(linear(128, 128, 128), rules)


@pytest.mark.parametrize("field, kept", [("inputs", "grad_input"), ("weights", "grad_weight"), ("gradients", "output")])
def test_a_role_that_is_switched_off_leaves_the_one_gemm_that_does_not_read_it(field: str, kept: Gemm) -> None:
    rules = make("cpu", **{f"quantize_{field}": False})
    for gemm in ("output", "grad_input", "grad_weight"):
        if gemm == kept:
            rewrite(linear(32, 32, 32, gemm), rules)
        else:
            assert reason(linear(32, 32, 32, gemm), rules) == f"quantize_{field}=False"


@pytest.mark.parametrize("target", ["cuda:89", "cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950"])
def test_no_gpu_multiplies_e5m2_by_e5m2(target: str) -> None:
    rules = make(target, forward_format="e5m2")
    formats = "e5m2fnuz by e5m2fnuz" if target == "hip:gfx942" else "e5m2 by e5m2"
    for gemm in ("output", "grad_input", "grad_weight"):
        assert reason(linear(32, 32, 32, gemm), rules) == f"{target} can't multiply {formats}"


def test_the_cpu_multiplies_e5m2_by_e5m2() -> None:
    plan = rewrite(linear(32, 32, 32, "grad_weight"), make("cpu", forward_format="e5m2"))
    assert (plan.left, plan.right) == (OperandPlan(E5M2, WHOLE), OperandPlan(E5M2, WHOLE))


def test_e5m2_by_e4m3_runs_on_a_gpu_whichever_side_has_it() -> None:
    assert rewrite(linear(32, 32, 32, "grad_input"), H100).left == OperandPlan(E5M2, WHOLE)
    assert rewrite(linear(32, 32, 32, "grad_weight"), H100).right == OperandPlan(E5M2, WHOLE)


# Plans


@pytest.mark.parametrize(
    "recipe, activation, weight",
    [("tensorwise", WHOLE, WHOLE), ("rowwise", (1, -1), (1, -1)), ("blockwise", (1, 128), (128, 128))],
)
def test_blocks_follow_recipe_and_role(recipe: str, activation: tuple[int, int], weight: tuple[int, int]) -> None:
    rules = make("cpu", recipe=recipe)
    gradients = E5M2 if recipe == "tensorwise" else E4M3
    expected = {
        "output": (OperandPlan(E4M3, activation), OperandPlan(E4M3, weight)),
        "grad_input": (OperandPlan(gradients, activation), OperandPlan(E4M3, weight)),
        "grad_weight": (OperandPlan(E4M3, activation), OperandPlan(gradients, activation)),
    }
    for gemm, (left, right) in expected.items():
        assert rewrite(linear(256, 256, 256, gemm), rules) == Rewrite(left, right, 1, 1, recipe)


def test_mi300_gets_its_own_formats() -> None:
    plan = rewrite(linear(32, 32, 32, "grad_input"), make("hip:gfx942"))
    assert (plan.left.format, plan.right.format) == (E5M2_FNUZ, E4M3_FNUZ)


# Sizes


@pytest.mark.parametrize("shape", [(0, 32, 32), (32, 0, 32), (32, 32, 0)])
def test_a_product_without_elements_is_skipped(shape: tuple[int, int, int]) -> None:
    assert reason(linear(*shape), CPU) == "no elements"


@pytest.mark.parametrize(
    "gemm, tokens, named", [("output", "M", "NK"), ("grad_input", "M", "NK"), ("grad_weight", "K", "MN")]
)
def test_min_dim_holds_for_the_sizes_of_the_layer_and_not_for_tokens(gemm: Gemm, tokens: str, named: str) -> None:
    assert token_dim(linear(32, 32, 32, gemm)) == tokens
    rewrite(linear(**{"m": 16, "n": 16, "k": 16, tokens.lower(): 1}, gemm=gemm), CPU)
    for dim in named:
        small = linear(**{"m": 16, "n": 16, "k": 16, dim.lower(): 15}, gemm=gemm)
        assert reason(small, CPU) == f"{dim}=15 is below min_dim=16"
        rewrite(small, dataclasses.replace(CPU, min_dim=15))


def test_with_the_weight_on_the_left_the_columns_count_tokens() -> None:
    site = product(Origin.PARAMETER, Origin.INPUT, came_in=True)
    mirrored = dataclasses.replace(
        site, left=dataclasses.replace(site.left, role=WEIGHT), right=dataclasses.replace(site.right, role=INPUT)
    )
    assert token_dim(mirrored) == "N"


def test_a_stack_is_rewritten_up_to_the_number_of_kernels_that_pays() -> None:
    assert MOST_SLICES == 64
    rewrite(product(Origin.INPUT, Origin.PARAMETER, came_in=True, batch=64), CPU)
    assert reason(product(Origin.INPUT, Origin.PARAMETER, came_in=True, batch=65), CPU) == (
        "65 stacked products would be 65 kernels (at most 64)"
    )


# Padding


@pytest.mark.parametrize("k, work", [(24, "1.3"), (20, "1.6"), (17, "1.9"), (25, "1.3")])
def test_padding_that_does_not_pay_is_a_reason_to_skip(k: int, work: str) -> None:
    expected = f"K={k} is not a multiple of 16, and padding would make it {work}x the work"
    assert reason(linear(32, 32, k), H100) == expected


@pytest.mark.parametrize("k", [26, 30, 100, 4095])
def test_padding_that_pays_is_done_and_told(k: int) -> None:
    plan = rewrite(linear(32, 32, k), H100)
    assert (plan.align_n, plan.align_k, plan.reason) == (1, 16, f"tensorwise, K={k} padded to a multiple of 16")


def test_padding_is_paid_for_in_both_dimensions() -> None:
    rewrite(linear(32, 32, 26), H100)  # 1.23 of the work
    rewrite(linear(32, 26, 32), H100)
    expected = "K=26 is not a multiple of 16, and padding would make it 1.5x the work"
    assert reason(linear(32, 27, 26), H100) == expected  # the size that costs more is named
    plan = rewrite(linear(32, 100, 120), H100)
    assert plan.reason == "tensorwise, N=100 padded to a multiple of 16, K=120 padded to a multiple of 16"
    assert (plan.align_n, plan.align_k) == (16, 16)


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_tokens_are_always_padded(tokens: int) -> None:
    plan = rewrite(linear(32, 32, tokens, "grad_weight"), H100)
    assert (plan.align_n, plan.align_k) == (1, 16)
    plan = rewrite(linear(tokens, 32, 32), H100)  # the rows of the left operand may be any number
    assert (plan.align_n, plan.align_k) == (1, 1)


def test_round_sizes_and_the_cpu_need_no_padding() -> None:
    for site, rules in ((linear(5, 48, 80), H100), (linear(5, 37, 41), CPU)):
        plan = rewrite(site, rules)
        assert (plan.align_n, plan.align_k, plan.reason) == (1, 1, "tensorwise")


def test_blockwise_on_a_gpu_wants_whole_blocks_along_the_contraction() -> None:
    rules = make("cuda:90", recipe="blockwise")
    plan = rewrite(linear(128, 128, 112), rules)
    assert (plan.align_n, plan.align_k, plan.reason) == (1, 128, "blockwise, K=112 padded to a multiple of 128")
    expected = "K=96 is not a multiple of 128, and padding would make it 1.3x the work"
    assert reason(linear(128, 128, 96), rules) == expected
    assert rewrite(linear(128, 128, 96), make("cpu", recipe="blockwise")).align_k == 1


def test_the_size_that_makes_padding_expensive_is_the_one_named() -> None:
    few_tokens = Matmul(
        placeholder(32, 20),
        "mm",
        "layer",
        "output",
        operand(placeholder(32, 20), WEIGHT, Origin.PARAMETER),
        operand(placeholder(20, 5), INPUT, Origin.INPUT),
    )
    assert reason(few_tokens, H100).startswith("K=20 is not a multiple of 16")


# Sizes that are not known when compiling


def test_a_symbolic_number_of_tokens_is_padded_on_a_gpu_and_left_alone_on_the_cpu() -> None:
    joint = joint_graph(nn.Linear(32, 48, bias=False), torch.randn(8, 32, requires_grad=True), dynamic=True)
    sites = output, grad_weight, grad_input = joint.matmuls()
    assert not isinstance(output.shape[0], int)
    plans = [rewrite(site, H100) for site in (output, grad_weight, grad_input)]
    assert [(plan.align_n, plan.align_k) for plan in plans] == [(1, 1), (1, 16), (1, 1)]
    assert all(rewrite(site, CPU).reason == "tensorwise" for site in sites)


def test_a_stack_of_a_symbolic_number_of_products_is_skipped() -> None:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    joint = joint_graph(product, torch.randn(3, 16, 32), torch.randn(3, 32, 16), dynamic=True)
    (site,) = joint.matmuls()
    weight = dataclasses.replace(site.right, origin=Origin.PARAMETER)
    expected = "the number of stacked products is known only when it runs"
    assert reason(dataclasses.replace(site, right=weight), CPU) == expected


def test_a_size_that_depends_on_values_is_skipped_where_padding_or_blocks_need_it() -> None:
    selected = ModuleOf(lambda self, x: x[x.sum(-1) > 0] @ self.w, w=nn.Parameter(torch.randn(32, 32)))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        joint = joint_graph(selected, torch.randn(16, 32))
    sites = joint.matmuls()
    assert sites
    for site in sites:
        assert reason(site, H100) == "a size is known only when it runs"
        assert reason(site, make("cpu", recipe="rowwise")) == "a size is known only when it runs"
        rewrite(site, CPU)
