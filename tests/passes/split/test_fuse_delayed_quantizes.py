"""One call of C++ for all of a delayed quantize: the split graphs of a Linear, their numbers, what is not fused."""

from __future__ import annotations

import expecttest
import pytest
import torch
from graph_text import DTYPES, describe, op_name, ops, render
from joint_graph import Split, apply, copy_graph, random_inputs, run, split
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fp8_compile.passes.split.call_cpu_kernels import CallCpuKernels
from fp8_compile.passes.split.drop_recompute_copies import DropRecomputeCopies
from fp8_compile.passes.split.fuse_delayed_quantizes import FuseDelayedQuantizes
from fp8_compile.torch_internals import patches

DTYPES.setdefault(torch.int32, "i32")
ARITHMETIC = {"abs", "amax", "gt", "lt", "where", "reciprocal", "clamp_max", "bitwise_and", "mul"}


def halves(model: nn.Module, tokens: int = 8, **options: object) -> Split:
    return split(model, torch.randn(tokens, 32, requires_grad=True), recipe="delayed", target="cpu", **options)


def before_and_after(graph: fx.Graph) -> tuple[fx.Graph, fx.Graph, int]:
    """The graph with calls of C++ for casts alone, and with these and all else fused."""
    plain = copy_graph(graph)
    for one in (DropRecomputeCopies(), CallCpuKernels()):
        apply(one, plain)
    fused = copy_graph(plain)
    return plain, fused, apply(FuseDelayedQuantizes(), fused)


def state_as_it_starts(graph: fx.Graph, known: float) -> list[torch.Tensor]:
    """Random inputs; the state's scales are ``known`` (0: none), its counts 0, and nothing is pending."""
    inputs = random_inputs(graph)
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        for user in node.users:
            if op_name(user) == "next_scales":
                position = user.args.index(node)
                inputs[index].fill_((-1.0, 0.0, known, 0, 0)[position])
    return inputs


@pytest.fixture(scope="module")
def linear() -> Split:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return halves(nn.Linear(32, 64, bias=False))


@pytest.fixture(scope="module")
def of_plain_ops() -> Split:
    """As the halves are where the partitioner can't be told that our cast is cheap."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with patches.without("cheap_ops"):
        return halves(nn.Linear(32, 64, bias=False))


@pytest.fixture(params=["linear", "of_plain_ops"])
def both_ways(request: pytest.FixtureRequest) -> Split:
    made: Split = request.getfixturevalue(request.param)
    return made


def test_golden_forward(linear: Split) -> None:
    _, fused, _ = before_and_after(linear.forward)
    expecttest.assert_expected_inline(render(fused), """\
primals_1: f32[64, 32]
primals_2: f32[8, 32]
primals_3: f32[32]
primals_4: f32[32, 16]
primals_5: f32[2, 32]
primals_6: i32[10, 32]
primals_7: i32[1]
primals_8: f32[32]
primals_9: f32[32, 16]
primals_10: f32[2, 32]
primals_11: i32[10, 32]
primals_12: i32[1]
next_scales: f32[2, 32] = next_scales(primals_3, primals_4, primals_5, primals_6, primals_7, 448.0, max, 1)
select: f32[32] = select(next_scales, 0, 0)
unsqueeze: f32[32, 1] = unsqueeze(select, 1)
unsqueeze_1: f32[32, 1, 1] = unsqueeze(unsqueeze, 2)
select_1: f32[1, 1] = select(unsqueeze_1, 0, 0)
quantize_delayed: (e4m3[8, 32], f32[1, 1], f32[1, 1], f32[1, 1]) = quantize_delayed(primals_2, select_1, e4m3, True)
select_2: f32[1, 1] = select(unsqueeze_1, 0, 1)
quantize_delayed_1: (e4m3[64, 32], f32[1, 1], f32[1, 1], f32[1, 1]) = quantize_delayed(primals_1, select_2, e4m3,
    True)
scaled_mm: f32[8, 64] = scaled_mm(quantize_delayed[0], quantize_delayed_1[0].T, quantize_delayed[2],
    quantize_delayed_1[2].T, None, f32)
update_scales: (f32[32, 16], f32[2, 32], i32[10, 32], i32[1]) = update_scales(primals_3, primals_4, primals_5,
    primals_6, primals_7, 448.0, max, 1)
record_amaxes: f32[32] = record_amaxes(primals_3, [quantize_delayed[3], quantize_delayed_1[3]], [0, 1],
    [next_scales])
copy_: f32[32, 16] = copy_(primals_4, update_scales[0])
copy__1: f32[2, 32] = copy_(primals_5, update_scales[1])
copy__2: i32[10, 32] = copy_(primals_6, update_scales[2])
copy__3: i32[1] = copy_(primals_7, update_scales[3])
copy__4: f32[32] = copy_(primals_3, record_amaxes)
return scaled_mm, primals_1, primals_8, primals_9, primals_10, primals_11, primals_12, quantize_delayed[2],
    quantize_delayed[0], quantize_delayed_1[1], quantize_delayed_1[2]
""")


def test_golden_backward(linear: Split) -> None:
    _, fused, _ = before_and_after(linear.backward)
    expecttest.assert_expected_inline(render(fused), """\
primals_1: f32[64, 32]
primals_8: f32[32]
primals_9: f32[32, 16]
primals_10: f32[2, 32]
primals_11: i32[10, 32]
primals_12: i32[1]
getitem_13: f32[1, 1]
cast_default: e4m3[8, 32]
getitem_15: f32[1, 1]
getitem_16: f32[1, 1]
tangents_1: f32[8, 64]
next_scales: f32[2, 32] = next_scales(primals_8, primals_9, primals_10, primals_11, primals_12, 57344.0, max, 1)
select: f32[32] = select(next_scales, 0, 0)
unsqueeze: f32[32, 1] = unsqueeze(select, 1)
unsqueeze_1: f32[32, 1, 1] = unsqueeze(unsqueeze, 2)
select_1: f32[1, 1] = select(unsqueeze_1, 0, 0)
quantize_delayed: (e5m2[8, 64], f32[1, 1], f32[1, 1], f32[1, 1]) = quantize_delayed(tangents_1, select_1, e5m2,
    True)
scaled_mm: f32[64, 32] = scaled_mm(quantize_delayed[0].T, cast_default, quantize_delayed[2].T, getitem_13, None,
    f32)
cast: e4m3[64, 32] = cast(primals_1, getitem_15, e4m3, [-1, -1])
scaled_mm_1: f32[8, 32] = scaled_mm(quantize_delayed[0], cast, quantize_delayed[2], getitem_16, None, f32)
update_scales: (f32[32, 16], f32[2, 32], i32[10, 32], i32[1]) = update_scales(primals_8, primals_9, primals_10,
    primals_11, primals_12, 57344.0, max, 1)
record_amaxes: f32[32] = record_amaxes(primals_8, [quantize_delayed[3]], [0], [next_scales])
copy_: f32[32, 16] = copy_(primals_9, update_scales[0])
copy__1: f32[2, 32] = copy_(primals_10, update_scales[1])
copy__2: i32[10, 32] = copy_(primals_11, update_scales[2])
copy__3: i32[1] = copy_(primals_12, update_scales[3])
copy__4: f32[32] = copy_(primals_8, record_amaxes)
return scaled_mm, scaled_mm_1, None, None, None, None, None, None, None, None, None, None
""")


@pytest.mark.parametrize("half, quantizes", [("forward", 2), ("backward", 1)])
def test_each_quantize_that_is_recorded_becomes_one_call(both_ways: Split, half: str, quantizes: int) -> None:
    plain, fused, changes = before_and_after(getattr(both_ways, half))
    assert changes == quantizes == ops(fused)["quantize_delayed"]
    assert ops(plain)["cast"] == quantizes + (half == "backward") and not ARITHMETIC & set(ops(fused))
    assert ops(fused).get("cast", 0) == (half == "backward"), "the weight's, again, with the scale of forward"


@pytest.mark.parametrize("half", ["forward", "backward"])
@pytest.mark.parametrize("known", [0.0, 3.0, 1e4])
def test_results_and_state_are_the_same_bits_as_before(both_ways: Split, half: str, known: float) -> None:
    plain, fused, _ = before_and_after(getattr(both_ways, half))
    inputs = [state_as_it_starts(plain, known) for _ in range(2)]  # each run writes to its own
    for one, two in zip(run(plain, inputs[0]), run(fused, inputs[1]), strict=True):
        assert one is two is None or torch.equal(one, two)
    assert all(torch.equal(one, two) for one, two in zip(*inputs)), "the state that they leave"
    start = state_as_it_starts(plain, known)
    assert any(not torch.equal(one, two) for one, two in zip(start, inputs[0])), "and something was recorded"


def test_the_same_is_saved_and_called_whether_the_partitioner_sees_calls_or_plain_ops(
    linear: Split, of_plain_ops: Split
) -> None:
    kept = [sorted(describe(node.meta["val"]) for node in made.saved) for made in (linear, of_plain_ops)]
    assert kept[0] == kept[1]
    views = {"select", "unsqueeze", "view"}
    for half in ("forward", "backward"):
        one, other = (ops(before_and_after(getattr(made, half))[1]) for made in (linear, of_plain_ops))
        assert {op: one[op] for op in one if op not in views} == {op: other[op] for op in other if op not in views}


def test_codes_are_written_where_they_are_read(linear: Split) -> None:
    wanted = {}
    for name, graph in (("forward", linear.forward), ("backward", linear.backward)):
        calls = [node for node in before_and_after(graph)[1].nodes if op_name(node) == "quantize_delayed"]
        wanted[name] = [(tuple(node.args[0].meta["val"].shape), node.args[3]) for node in calls]
    assert wanted == {"forward": [((8, 32), True), ((64, 32), True)], "backward": [((8, 64), True)]}


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.down(torch.tanh(self.up(x))), x, use_reentrant=False)


def test_what_backward_makes_again_is_not_fused_and_finds_no_amax() -> None:
    made = halves(Checkpointed())
    plain, fused, changes = before_and_after(made.backward)
    assert changes == ops(fused)["quantize_delayed"] == 2, "the two gradients"
    assert ops(fused)["cast"] >= 2, "input and weight are cast by known scales"
    recorded = [node for node in fused.nodes if op_name(node) == "record_amaxes"]
    assert [len(node.args[1]) for node in recorded] == [2]
    assert ops(before_and_after(made.forward)[1])["quantize_delayed"] == 4


def test_tensorwise_graphs_are_left_alone() -> None:
    made = split(nn.Linear(32, 64), torch.randn(8, 32, requires_grad=True), recipe="tensorwise", target="cpu")
    for graph in (made.forward, made.backward):
        plain, fused, changes = before_and_after(graph)
        assert changes == 0 and render(plain) == render(fused)
