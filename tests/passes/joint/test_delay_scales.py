"""Delayed scales in a joint graph: the graph of a Linear, its numbers, and what becomes of the state."""

from __future__ import annotations

import dataclasses
from typing import Any

import expecttest
import pytest
import torch
from graph_text import DTYPES, difference, op_name, ops, render
from joint_graph import JointGraph, apply, fp8, joint_graph, make, random_inputs, run
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._subclasses import FakeTensorMode

from fp8_compile.kernels import delayed_scaling
from fp8_compile.kernels.delayed_scaling import STEADY
from fp8_compile.kernels.formats import E4M3, E4M3_FNUZ, E5M2
from fp8_compile.passes.graph.roles import Role
from fp8_compile.passes.graph.slot import (
    BACKWARD,
    FIELDS,
    FORWARD,
    FROZEN,
    STATS,
    Place,
    TensorUse,
    state_input,
    state_of,
)
from fp8_compile.passes.graph.update_rule import UpdateRule
from fp8_compile.passes.joint.delay_scales import DelayScales
from fp8_compile.passes.joint.lower_quantizes import LowerQuantizes
from fp8_compile.passes.joint.rewrite_matmuls import RewriteMatmuls
from fp8_compile.passes.joint.share_quantizes import ShareQuantizes
from fp8_compile.torch_internals.aot import name_input, named_inputs

DTYPES.setdefault(torch.int32, "i32")
LENGTH = 3
STATE_OPS = ("next_scales", "update_scales", "record_amaxes", "add_counts")


class Pool:
    """Slots in the order in which they are asked for, in one page per direction. ``frozen``: of inputs alone, all of
    them frozen."""

    def __init__(self, *, frozen: bool = False) -> None:
        self.frozen = frozen
        self.slots: dict[str, list[TensorUse]] = {FORWARD: [], BACKWARD: [], FROZEN: []}

    def direction(self, tensor: TensorUse) -> str:
        return FROZEN if self.frozen else tensor.direction

    def place(self, tensor: TensorUse) -> Place | None:
        if self.frozen and tensor.role is not Role.INPUT:
            return None
        known = self.slots[self.direction(tensor)]
        if tensor not in known:
            known.append(tensor)
        return Place(0, known.index(tensor))


@dataclasses.dataclass
class Delayed:
    graph: fx.Graph
    pool: Pool
    changes: int


def add_state(graph: fx.Graph, rows: int, *, stats: bool = False, frozen: bool = False) -> None:
    """Placeholders for a page per direction, as the backend's buffers become."""
    first = next(iter(graph.nodes))
    mode: FakeTensorMode = first.meta["val"].fake_mode
    shapes = {"amaxes": (rows,), "history": (rows, LENGTH), "scales": (2, rows), "counts": (STEADY + 1, rows)}
    shapes |= {"room": (1,), STATS: (rows, 5)}
    dtypes = {"counts": torch.int32, "room": torch.int32, STATS: torch.float64}
    with graph.inserting_before(first):
        for direction in (FORWARD, BACKWARD, FROZEN)[: 3 if frozen else 2]:
            for field in (*FIELDS, STATS) if stats else FIELDS:
                name = state_input(direction, 0, field)
                node = graph.placeholder(name)
                made = torch.zeros(shapes[field], dtype=dtypes.get(field, torch.float32))
                node.meta.update(val=mode.from_tensor(made, static_shapes=True), desc=PlainAOTInput(1000))
                name_input(node, name)


def delayed(
    joint: JointGraph,
    target: str = "cpu",
    *,
    rows: int = 4,
    stats: bool = False,
    frozen: bool = False,
    **options: Any,
) -> Delayed:
    graph, pool = joint.copy(), Pool(frozen=frozen)
    add_state(graph, rows, stats=stats, frozen=frozen)
    apply(RewriteMatmuls(make(target, recipe="delayed"), joint.names), graph)
    apply(ShareQuantizes(), graph)
    rule = UpdateRule(**options)
    return Delayed(graph, pool, apply(DelayScales(pool, rule, look_first=target == "cpu", stats=stats), graph))


@pytest.fixture(scope="module")
def linear() -> JointGraph:
    return joint_graph(nn.Linear(32, 64, bias=False), torch.randn(8, 32, requires_grad=True))


@pytest.fixture(scope="module")
def stack() -> JointGraph:
    layers = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(5)))
    return joint_graph(layers, torch.randn(8, 32, requires_grad=True))


def state_inputs(graph: fx.Graph, **fields: torch.Tensor) -> list[Any]:
    """Random inputs, and a state that knows nothing but what ``fields`` says of a buffer."""
    inputs = random_inputs(graph)
    inputs_by_node = {node: name for name, node in named_inputs(graph).items()}
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        target = inputs_by_node.get(node, "")
        if target.startswith("fp8_"):
            made = torch.full_like(inputs[index], delayed_scaling.ABSENT if target.endswith("amaxes") else 0)
            inputs[index] = fields.get(target, made).clone()
    return inputs


def named(graph: fx.Graph, inputs: list[Any]) -> dict[str, torch.Tensor]:
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    return dict(zip(names, inputs))


# --- goldens


def test_golden_for_a_gpu_where_scales_are_known_before_the_tensors(linear: JointGraph) -> None:
    expecttest.assert_expected_inline(render(delayed(linear, "cuda:90").graph), """\
fp8_forward_0_amaxes: f32[4]
fp8_forward_0_history: f32[4, 3]
fp8_forward_0_scales: f32[2, 4]
fp8_forward_0_counts: i32[10, 4]
fp8_forward_0_room: i32[1]
fp8_backward_0_amaxes: f32[4]
fp8_backward_0_history: f32[4, 3]
fp8_backward_0_scales: f32[2, 4]
fp8_backward_0_counts: i32[10, 4]
fp8_backward_0_room: i32[1]
primals_1: f32[64, 32]
primals_2: f32[8, 32]
tangents_1: f32[8, 64]
next_scales: f32[2, 4] = next_scales(fp8_backward_0_amaxes, fp8_backward_0_history, fp8_backward_0_scales,
    fp8_backward_0_counts, fp8_backward_0_room, 57344.0, max, 1)
next_scales_1: f32[2, 4] = next_scales(fp8_forward_0_amaxes, fp8_forward_0_history, fp8_forward_0_scales,
    fp8_forward_0_counts, fp8_forward_0_room, 448.0, max, 1)
select: f32[4] = select(next_scales_1, 0, 0)
select_1: f32[] = select(select, 0, 0)
view: f32[1, 1] = view(select_1, [1, 1])
select_2: f32[4] = select(next_scales_1, 0, 1)
select_3: f32[] = select(select_2, 0, 0)
view_1: f32[1, 1] = view(select_3, [1, 1])
abs: f32[8, 32] = abs(primals_2)
amax: f32[1, 1] = amax(abs, [0, 1], True)
mul: f32[8, 32] = mul(primals_2, view)
clamp_min: f32[8, 32] = clamp_min(mul, -448.0)
clamp_max: f32[8, 32] = clamp_max(clamp_min, 448.0)
mul_1: f32[8, 32] = mul(primals_2, 0.0)
add: f32[8, 32] = add(clamp_max, mul_1)
to: e4m3[8, 32] = to(add, e4m3)
select_4: f32[4] = select(next_scales_1, 0, 0)
select_5: f32[] = select(select_4, 0, 1)
view_2: f32[1, 1] = view(select_5, [1, 1])
select_6: f32[4] = select(next_scales_1, 0, 1)
select_7: f32[] = select(select_6, 0, 1)
view_3: f32[1, 1] = view(select_7, [1, 1])
abs_1: f32[64, 32] = abs(primals_1)
amax_1: f32[1, 1] = amax(abs_1, [0, 1], True)
mul_2: f32[64, 32] = mul(primals_1, view_2)
clamp_min_1: f32[64, 32] = clamp_min(mul_2, -448.0)
clamp_max_1: f32[64, 32] = clamp_max(clamp_min_1, 448.0)
mul_3: f32[64, 32] = mul(primals_1, 0.0)
add_1: f32[64, 32] = add(clamp_max_1, mul_3)
to_1: e4m3[64, 32] = to(add_1, e4m3)
_scaled_mm: f32[8, 64] = _scaled_mm(to, to_1.T, view_1, view_3, fast_accum)
select_8: f32[4] = select(next_scales, 0, 0)
select_9: f32[] = select(select_8, 0, 0)
view_4: f32[1, 1] = view(select_9, [1, 1])
select_10: f32[4] = select(next_scales, 0, 1)
select_11: f32[] = select(select_10, 0, 0)
view_5: f32[1, 1] = view(select_11, [1, 1])
abs_2: f32[8, 64] = abs(tangents_1)
amax_2: f32[1, 1] = amax(abs_2, [0, 1], True)
mul_4: f32[8, 64] = mul(tangents_1, view_4)
clamp_min_2: f32[8, 64] = clamp_min(mul_4, -57344.0)
clamp_max_2: f32[8, 64] = clamp_max(clamp_min_2, 57344.0)
mul_5: f32[8, 64] = mul(tangents_1, 0.0)
add_2: f32[8, 64] = add(clamp_max_2, mul_5)
to_2: e5m2[8, 64] = to(add_2, e5m2)
bitcast: u8[8, 64] = bitcast(to_2, u8)
pad: u8[64, 16] = pad(bitcast.T, [0, 8, 0, 0], 0.0)
clone: u8[64, 16] = clone(pad)
bitcast_1: e5m2[64, 16] = bitcast(clone, e5m2)
bitcast_2: u8[8, 32] = bitcast(to, u8)
pad_1: u8[32, 16] = pad(bitcast_2.T, [0, 8, 0, 0], 0.0)
clone_1: u8[32, 16] = clone(pad_1)
bitcast_3: e4m3[32, 16] = bitcast(clone_1, e4m3)
_scaled_mm_1: f32[64, 32] = _scaled_mm(bitcast_1, bitcast_3.T, view_5, view_1)
bitcast_4: u8[64, 32] = bitcast(to_1, u8)
clone_2: u8[32, 64] = clone(bitcast_4.T)
bitcast_5: e4m3[32, 64] = bitcast(clone_2, e4m3)
_scaled_mm_2: f32[8, 32] = _scaled_mm(to_2, bitcast_5.T, view_5, view_3)
update_scales: (f32[4, 3], f32[2, 4], i32[10, 4], i32[1]) = update_scales(fp8_forward_0_amaxes,
    fp8_forward_0_history, fp8_forward_0_scales, fp8_forward_0_counts, fp8_forward_0_room, 448.0, max, 1)
record_amaxes: f32[4] = record_amaxes(fp8_forward_0_amaxes, [amax, amax_1], [0, 1], [next_scales_1, bitcast_3,
    bitcast_5])
copy_: f32[4, 3] = copy_(fp8_forward_0_history, update_scales[0])
copy__1: f32[2, 4] = copy_(fp8_forward_0_scales, update_scales[1])
copy__2: i32[10, 4] = copy_(fp8_forward_0_counts, update_scales[2])
copy__3: i32[1] = copy_(fp8_forward_0_room, update_scales[3])
copy__4: f32[4] = copy_(fp8_forward_0_amaxes, record_amaxes)
update_scales_1: (f32[4, 3], f32[2, 4], i32[10, 4], i32[1]) = update_scales(fp8_backward_0_amaxes,
    fp8_backward_0_history, fp8_backward_0_scales, fp8_backward_0_counts, fp8_backward_0_room, 57344.0, max, 1)
record_amaxes_1: f32[4] = record_amaxes(fp8_backward_0_amaxes, [amax_2], [0], [next_scales])
copy__5: f32[4, 3] = copy_(fp8_backward_0_history, update_scales_1[0])
copy__6: f32[2, 4] = copy_(fp8_backward_0_scales, update_scales_1[1])
copy__7: i32[10, 4] = copy_(fp8_backward_0_counts, update_scales_1[2])
copy__8: i32[1] = copy_(fp8_backward_0_room, update_scales_1[3])
copy__9: f32[4] = copy_(fp8_backward_0_amaxes, record_amaxes_1)
return _scaled_mm, _scaled_mm_1, _scaled_mm_2
""")


def state_and_scales(node: fx.Node) -> bool:
    name = op_name(node)
    return name in (*STATE_OPS, "copy_", "amax", "where", "select", "quantize", "_scaled_mm", "reciprocal")


def test_golden_for_a_cpu_where_a_slot_without_a_scale_takes_its_own(linear: JointGraph) -> None:
    on_gpu, on_cpu = (delayed(linear, target).graph for target in ("cuda:90", "cpu"))
    expecttest.assert_expected_inline(difference(on_gpu, on_cpu, state_and_scales), """\
- select_2: f32[4] = select(next_scales_1, 0, 1)
- select_3: f32[] = select(select_2, 0, 0)
+ reciprocal: f32[1, 1] = reciprocal(amax)
+ where: f32[1, 1] = where(bitwise_and, clamp_max, scalar_tensor)
+ where_1: f32[1, 1] = where(gt_1, view, where)
+ reciprocal_1: f32[1, 1] = reciprocal(where_1)
- select_4: f32[4] = select(next_scales_1, 0, 0)
+ select_2: f32[4] = select(next_scales_1, 0, 0)
- select_5: f32[] = select(select_4, 0, 1)
+ select_3: f32[] = select(select_2, 0, 1)
- select_6: f32[4] = select(next_scales_1, 0, 1)
- select_7: f32[] = select(select_6, 0, 1)
+ reciprocal_2: f32[1, 1] = reciprocal(amax_1)
+ where_2: f32[1, 1] = where(bitwise_and_1, clamp_max_2, scalar_tensor_1)
+ where_3: f32[1, 1] = where(gt_3, view_1, where_2)
+ reciprocal_3: f32[1, 1] = reciprocal(where_3)
- _scaled_mm: f32[8, 64] = _scaled_mm(to, to_1.T, view_1, view_3, fast_accum)
+ _scaled_mm: f32[8, 64] = _scaled_mm(to, to_1.T, reciprocal_1, reciprocal_3.T)
- select_8: f32[4] = select(next_scales, 0, 0)
+ select_4: f32[4] = select(next_scales, 0, 0)
- select_9: f32[] = select(select_8, 0, 0)
+ select_5: f32[] = select(select_4, 0, 0)
- select_10: f32[4] = select(next_scales, 0, 1)
- select_11: f32[] = select(select_10, 0, 0)
- _scaled_mm_1: f32[64, 32] = _scaled_mm(bitcast_1, bitcast_3.T, view_5, view_1)
- _scaled_mm_2: f32[8, 32] = _scaled_mm(to_2, bitcast_5.T, view_5, view_3)
+ reciprocal_4: f32[1, 1] = reciprocal(amax_2)
+ where_4: f32[1, 1] = where(bitwise_and_2, clamp_max_4, scalar_tensor_2)
+ where_5: f32[1, 1] = where(gt_5, view_2, where_4)
+ reciprocal_5: f32[1, 1] = reciprocal(where_5)
+ _scaled_mm_1: f32[64, 32] = _scaled_mm(to_2.T, to, reciprocal_5.T, reciprocal_1)
+ _scaled_mm_2: f32[8, 32] = _scaled_mm(to_2, to_1, reciprocal_5, reciprocal_3)
- record_amaxes: f32[4] = record_amaxes(fp8_forward_0_amaxes, [amax, amax_1], [0, 1], [next_scales_1, bitcast_3,
+ record_amaxes: f32[4] = record_amaxes(fp8_forward_0_amaxes, [amax, amax_1], [0, 1], [next_scales_1])
-     bitcast_5])
""")


# --- counts


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
@pytest.mark.parametrize("stats", [False, True])
def test_one_update_and_one_record_a_direction_however_many_layers(stack: JointGraph, target: str, stats: bool) -> None:
    made = delayed(stack, target, rows=16, stats=stats)
    counts = ops(made.graph)
    assert made.changes == 15, "an input, a weight and a gradient of each of five layers"
    assert {name: counts.get(name, 0) for name in STATE_OPS} == {
        "next_scales": 2, "update_scales": 2, "record_amaxes": 2, "add_counts": 2 * stats,
    }  # fmt: skip
    assert counts["amax"] == 15, "each tensor is reduced once"
    assert counts["copy_"] == 10 + 2 * stats and "quantize" not in counts
    assert (len(made.pool.slots[FORWARD]), len(made.pool.slots[BACKWARD])) == (10, 5)
    recorded = [node for node in made.graph.nodes if op_name(node) == "record_amaxes"]
    assert sorted(len(node.args[1]) for node in recorded) == [5, 10]
    assert all(list(node.args[2]) == list(range(len(node.args[1]))) for node in recorded)


def test_what_forward_quantizes_is_tagged_for_forward_and_gradients_for_backward(stack: JointGraph) -> None:
    graph = delayed(stack, rows=16).graph
    for node in graph.nodes:
        if op_name(node) in (*STATE_OPS, "copy_") if node.op == "call_function" else False:
            source = node
            while source.op != "placeholder":
                source = source.args[0]
            direction = source.name.split("_")[1]
            assert node.meta["partitioner_tag"] == f"must_be_in_{direction}", node.format_node()


def test_a_graph_without_state_is_left_to_scale_each_tensor_by_itself(linear: JointGraph) -> None:
    graph = linear.copy()
    apply(RewriteMatmuls(make("cpu", recipe="delayed"), linear.names), graph)
    before = render(graph)
    assert apply(DelayScales(Pool(), UpdateRule(), look_first=True), graph) == 0
    assert render(graph) == before and "quantize" in before


# --- numbers


def test_without_history_the_results_are_those_of_scales_of_each_tensor_itself(linear: JointGraph) -> None:
    made = delayed(linear)
    tensorwise = linear.copy()
    for one in (RewriteMatmuls(make("cpu", recipe="delayed"), linear.names), ShareQuantizes(), LowerQuantizes()):
        apply(one, tensorwise)
    inputs = state_inputs(made.graph)
    plain = inputs[-len(tensorwise.find_nodes(op="placeholder")) :]
    for found, expected in zip(run(made.graph, inputs), run(tensorwise, plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_known_scales_quantize_and_the_state_is_written_where_it_lies(linear: JointGraph, target: str) -> None:
    made = delayed(linear, target)
    forward, backward = (state_input(direction, 0, "scales") for direction in (FORWARD, BACKWARD))
    quant = torch.tensor([8.0, 16.0, 0.0, 0.0]), torch.tensor([4.0, 0.0, 0.0, 0.0])
    known = [torch.stack([row, torch.where(row > 0, 1 / row, 0.0)]) for row in quant]
    inputs = state_inputs(made.graph, **{forward: known[0], backward: known[1]})
    by_name = named(made.graph, inputs)
    weight, x, dy = inputs[-3:]
    y, grad_weight, grad_x = run(made.graph, inputs)

    def by_scale(tensor: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        largest = torch.finfo(dtype).max
        return (tensor * scale).clamp(-largest, largest).to(dtype).double() / scale

    qx, qw = by_scale(x, 8, torch.float8_e4m3fn), by_scale(weight, 16, torch.float8_e4m3fn)
    qdy = by_scale(dy, 4, torch.float8_e5m2)
    for found, expected in ((y, qx @ qw.T), (grad_weight, qdy.T @ qx), (grad_x, qdy @ qw)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    amaxes = [tensor.abs().max().item() for tensor in (x, weight)]
    assert by_name[state_input(FORWARD, 0, "amaxes")].tolist() == [*amaxes, -1, -1]
    assert by_name[state_input(BACKWARD, 0, "amaxes")].tolist() == [dy.abs().max().item(), -1, -1, -1]
    assert not by_name[state_input(FORWARD, 0, "counts")].any(), "recorded; it enters when the next pass begins"


def test_a_pass_begins_with_the_update_that_follows_from_the_one_before(linear: JointGraph) -> None:
    made = delayed(linear, "cuda:90")
    amaxes, counts = (state_input(FORWARD, 0, field) for field in ("amaxes", "counts"))
    margins = torch.zeros(STEADY + 1, 4, dtype=torch.int32)
    margins[delayed_scaling.MARGIN] = 1
    inputs = state_inputs(made.graph, **{amaxes: torch.tensor([2.0, 0.5, -1.0, -1.0]), counts: margins})
    by_name = named(made.graph, inputs)
    weight, x, _ = inputs[-3:]
    y = run(made.graph, inputs)[0]
    scales = by_name[state_input(FORWARD, 0, "scales")]
    assert scales[0].tolist() == [448 / 4, 448.0, 0, 0]
    qx = (x * 112).clamp(-448, 448).to(torch.float8_e4m3fn).double() / 112
    qw = (weight * 448).clamp(-448, 448).to(torch.float8_e4m3fn).double() / 448
    torch.testing.assert_close(y.double(), qx @ qw.T, rtol=1e-5, atol=1e-5)
    assert by_name[state_input(FORWARD, 0, "history")][:, 0].tolist() == [2.0, 0.5, 0, 0]
    assert by_name[counts][:2].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert torch.equal(by_name[counts][2:], margins[2:])


# --- inference


@pytest.fixture(scope="module")
def inference() -> JointGraph:
    with torch.no_grad():
        return joint_graph(nn.Linear(32, 64, bias=False), torch.randn(8, 32))


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_an_inference_graph_reads_and_writes_no_state_of_training(inference: JointGraph, target: str) -> None:
    """What a call computes does not depend on the calls before: each tensor has its own scale."""
    made = delayed(inference, target)
    counts = ops(made.graph)
    assert made.changes == 0 and counts["quantize"] == 2
    assert not {*STATE_OPS, "copy_"} & set(counts) and not any(made.pool.slots.values())


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_frozen_scales_quantize_inputs_of_an_inference_graph_and_are_not_changed(
    inference: JointGraph, target: str
) -> None:
    made = delayed(inference, target, frozen=True, algorithm="p99", interval=3)
    apply(LowerQuantizes(), made.graph)
    names = {field: state_input(FROZEN, 0, field) for field in FIELDS}
    known = torch.tensor([[8.0, 0, 0, 0], [0.125, 0, 0, 0]])
    pending = torch.tensor([100.0, -1, -1, -1])  # of the call before: 100 * 8 is beyond 448
    inputs = state_inputs(made.graph, **{names["scales"]: known, names["amaxes"]: pending})
    (y,) = run(made.graph, inputs)
    by_name = named(made.graph, inputs)
    x, weight = sorted(inputs[-2:], key=len)
    qx = (x * 8).clamp(-448, 448).to(torch.float8_e4m3fn).double() / 8
    torch.testing.assert_close(y.double(), qx @ fp8(weight, torch.float8_e4m3fn).T, rtol=1e-5, atol=1e-5)
    assert torch.equal(by_name[names["scales"]], known)
    assert by_name[names["amaxes"]].tolist() == [x.abs().max().item(), -1, -1, -1]
    assert by_name[names["counts"]][:5, 0].tolist() == [1, 1, 1, 0, 0], "saturated once"
    assert made.changes == 1 and [len(slots) for slots in made.pool.slots.values()] == [0, 0, 1]


def test_a_graph_that_trains_leaves_frozen_scales_alone(linear: JointGraph) -> None:
    graph, pool = linear.copy(), Pool()
    add_state(graph, 4, frozen=True)
    assert {name.split("_")[1] for name in state_of(graph)} == {FORWARD, BACKWARD}
    apply(RewriteMatmuls(make("cpu", recipe="delayed"), linear.names), graph)
    apply(DelayScales(pool, UpdateRule(), look_first=True), graph)
    unused = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith(f"fp8_{FROZEN}")]
    assert len(unused) == len(FIELDS) and not any(node.users for node in unused)


# --- margins


def test_weights_have_no_margin_and_what_flows_has_that_of_its_format() -> None:
    plain, wider = UpdateRule(), UpdateRule(margin=3)
    for format, margin in ((E4M3, 2), (E4M3_FNUZ, 2), (E5M2, 6)):
        for role in Role:
            expected = 0 if role is Role.WEIGHT else margin
            assert plain.margin_of(role, format.max) == expected
            assert wider.margin_of(role, format.max) == expected + 3, "the option comes on top"
