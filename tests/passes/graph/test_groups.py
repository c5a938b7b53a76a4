"""Ragged groups in whatever operation they come, and what is decided for them."""

from __future__ import annotations

import pytest
import torch
from grouped import Layer, offsets_of
from joint_graph import JointGraph, joint_graph, make
from torch import Tensor, nn

from fp8_compile.passes.graph.matmul import GroupedMatmul, Matmul, OtherMatmul
from fp8_compile.passes.graph.rules import Rules
from fp8_compile.passes.joint.decide import Rewrite, Skip, decide

EXPERTS, K, N, TOKENS = 4, 32, 48, 24


def joint_of(
    *,
    k: int = K,
    n: int = N,
    tokens: int = TOKENS,
    transposed: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> JointGraph:
    layer = Layer(EXPERTS, k, n, transposed=transposed, dtype=dtype)
    return joint_graph(layer, torch.randn(tokens, k, dtype=dtype, requires_grad=True), offsets_of(7, 0, 16, 1))


@pytest.fixture(scope="module")
def bf16() -> JointGraph:
    return joint_of()


@pytest.fixture(scope="module")
def fp32() -> JointGraph:
    return joint_of(dtype=torch.float32)


def grouped_in(joint: JointGraph) -> dict[str, GroupedMatmul]:
    found = {site.gemm: site for site in joint.matmuls() if isinstance(site, GroupedMatmul)}
    assert len(found) == len(joint.matmuls()) == 3
    return found


def decided(joint: JointGraph, rules: Rules) -> dict[str, str]:
    """Gemm -> "" or why not."""
    decisions = {gemm: decide(site, rules) for gemm, site in grouped_in(joint).items()}
    return {gemm: "" if isinstance(one, Rewrite) else one.reason for gemm, one in decisions.items()}


def test_all_three_gemms_are_found_with_their_roles_and_linked(bf16: JointGraph, fp32: JointGraph) -> None:
    for joint, op, backward in (
        (bf16, "_grouped_mm", "_grouped_mm"),
        (fp32, "grouped_mm_fallback", "grouped_mm_fallback_backward"),
    ):
        sites = grouped_in(joint)
        assert {gemm: (site.left.role, site.right.role) for gemm, site in sites.items()} == {
            "output": ("input", "weight"),
            "grad_input": ("grad_output", "weight"),
            "grad_weight": ("grad_output", "input"),  # as the transposed weight is stored
        }
        assert {gemm: site.shape for gemm, site in sites.items()} == {
            "output": (EXPERTS, TOKENS, N, K),
            "grad_input": (EXPERTS, TOKENS, K, N),
            "grad_weight": (EXPERTS, N, K, TOKENS),
        }
        assert {site.module for site in sites.values()} == {"experts"}
        assert {site.weights for site in sites.values()} == {("experts.w",)}
        assert {gemm: site.op for gemm, site in sites.items()} == {
            "output": op,
            "grad_input": backward,
            "grad_weight": backward,
        }
        assert sites["grad_input"].forward == sites["grad_weight"].forward == sites["output"]


def test_a_weight_that_lies_as_it_is_multiplied_has_its_gradient_so() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        site = grouped_in(joint_of(transposed=False, dtype=dtype))["grad_weight"]
        assert (site.left.role, site.right.role) == ("input", "grad_output") and not site.product.flipped
        assert site.shape == (EXPERTS, K, N, TOKENS)


class OtherForms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 32, 32, dtype=torch.bfloat16))

    def forward(self, x: Tensor, columns: Tensor, offsets: Tensor) -> Tensor:
        stacked = torch._grouped_mm(x, self.w)  # a plain stack
        return stacked.sum() + torch._grouped_mm(self.w, columns, offs=offsets).sum()  # groups of columns


def test_other_forms_of_the_operation_are_left_alone_with_a_reason() -> None:
    given = torch.randn(4, 8, 32, dtype=torch.bfloat16), torch.randn(32, 24, dtype=torch.bfloat16)
    with torch.no_grad():
        sites = joint_graph(OtherForms(), *given, offsets_of(7, 0, 16, 1)).matmuls()
    assert [type(site) for site in sites] == [OtherMatmul, OtherMatmul]
    assert {site.reason for site in sites} == {"ragged groups: not in the form [T, K] by [experts, K, N]"}  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise"])
def test_a_cpu_multiplies_all_three(fp32: JointGraph, recipe: str) -> None:
    assert set(decided(fp32, make("cpu", recipe=recipe)).values()) == {""}


@pytest.mark.parametrize(
    "recipe, target, size", [("blockwise", "cpu", 128), ("blockwise", "cuda:90", 128), ("nvfp4", "cuda:100", 16)]
)
def test_blocks_that_no_gemm_of_groups_has_do_not_go_with_groups(
    bf16: JointGraph, recipe: str, target: str, size: int
) -> None:
    reasons = set(decided(bf16, make(target, recipe=recipe)).values())
    assert reasons == {f"ragged groups: blocks of {size} would reach from one group into the next"}


@pytest.mark.parametrize("recipe, target", [("mxfp8", "cpu"), ("mxfp8", "cuda:100"), ("blockwise", "cuda:100")])
def test_experts_are_multiplied_in_mxfp8_where_their_sizes_are_multiples_of_its_blocks(
    recipe: str, target: str
) -> None:
    multiple = 32 if target == "cpu" else 128
    good, odd = (joint_of(k=128, n=n, tokens=512, dtype=torch.bfloat16) for n in (256, 272))
    rules = make(target, recipe=recipe)
    assert set(decided(good, rules).values()) == {""}
    assert decided(odd, rules)["output"] == f"ragged groups: N=272 is not a multiple of {multiple}"
    refused = decided(good, make(target, recipe=recipe, backward="dequantized"))["grad_weight"]
    assert refused == "backward='dequantized': what experts multiply in MXFP8 can't be read again"


def test_few_tokens_are_not_filled_up_to_many() -> None:
    few = joint_of(k=128, n=128, tokens=511, dtype=torch.bfloat16)
    reasons = set(decided(few, make("cuda:100", recipe="mxfp8")).values())
    assert reasons == {"ragged groups: 511 tokens for 4 experts, fewer than the 128 that each is filled up to"}
    assert set(decided(few, make("cpu", recipe="mxfp8")).values()) == {""}


@pytest.mark.parametrize("target", ["cuda:89", "cuda:120", "hip:gfx942"])
def test_a_gpu_without_such_a_gemm_is_named(bf16: JointGraph, target: str) -> None:
    reasons = set(decided(bf16, make(target, recipe="rowwise")).values())
    assert reasons == {f"ragged groups: torch has no FP8 gemm of them for {target}"}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise"])
def test_a_b200_names_the_recipe_that_it_has_for_groups(bf16: JointGraph, recipe: str) -> None:
    reasons = set(decided(bf16, make("cuda:100", recipe=recipe)).values())
    assert reasons == {"ragged groups: cuda:100 multiplies them in MXFP8 only (recipe='mxfp8')"}


def test_what_torchs_gemm_for_gpus_refuses_is_skipped_with_the_reason(bf16: JointGraph) -> None:
    assert decided(bf16, make("cuda:90")) == {
        "output": "",
        "grad_input": "ragged groups: torch multiplies them in e4m3 only, not in e5m2",
        "grad_weight": "ragged groups: torch multiplies them in e4m3 only, not in e5m2",
    }
    assert set(decided(bf16, make("cuda:90", recipe="rowwise")).values()) == {""}
    odd = joint_of(k=40, n=48, dtype=torch.float32)
    assert decided(odd, make("cuda:90", recipe="rowwise"))["output"] == "ragged groups: K=40 is not a multiple of 16"


class PerGroup(nn.Module):
    """A product over the tokens of each group, in forward: as a gradient of weights is."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(TOKENS, 32, dtype=torch.bfloat16))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return torch._grouped_mm(x.t(), self.w, offs=offsets)


def test_a_product_over_tokens_is_known_by_its_form_and_not_by_its_place() -> None:
    with torch.no_grad():
        x = torch.randn(TOKENS, 32, dtype=torch.bfloat16)
        (site,) = joint_graph(PerGroup(), x, offsets_of(7, 0, 16, 1)).matmuls()
    assert isinstance(site, GroupedMatmul) and (site.gemm, site.shape) == ("output", (4, 32, 32, TOKENS))
    assert isinstance(decide(site, make("cpu")), Rewrite)
    assert isinstance(decide(site, make("cuda:90", recipe="rowwise")), Rewrite)


def test_names_switches_and_sizes_decide_as_for_other_products(fp32: JointGraph) -> None:
    assert set(decided(fp32, make("cpu", exclude=("experts",))).values()) == {"excluded by 'experts'"}
    assert set(decided(fp32, make("cpu", exclude=("experts.w",))).values()) == {"excluded by 'experts.w'"}
    assert decided(fp32, make("cpu", quantize_gradients=False)) == {
        "output": "",
        "grad_input": "quantize_gradients=False",
        "grad_weight": "quantize_gradients=False",
    }
    assert decided(fp32, make("cpu", min_dim=33)) == {
        "output": "K=32 is below min_dim=33",
        "grad_input": "N=32 is below min_dim=33",
        "grad_weight": "N=32 is below min_dim=33",
    }


@pytest.mark.parametrize("tokens", [99, 100])
def test_many_experts_are_one_operation_unless_there_are_fewer_tokens_than_experts(tokens: int) -> None:
    layer = Layer(100, 32, 32, dtype=torch.float32)
    with torch.no_grad():
        (site,) = joint_graph(layer, torch.randn(tokens, 32), offsets_of(tokens, *[0] * 99)).matmuls()
    assert isinstance(site, Matmul)
    if tokens >= 100:
        assert isinstance(decide(site, make("cpu")), Rewrite)
    else:
        reason = "ragged groups: 99 tokens for 100 experts, which would all be quantized"
        assert decide(site, make("cpu")) == Skip(reason)
