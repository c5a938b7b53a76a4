"""The state changed in place once the graph is split: on a CPU, on a GPU, and with the numbers of before."""

from __future__ import annotations

import re
from typing import Any, Callable, Sequence

import expecttest
import pytest
import torch
from graph_text import op_name, ops, render
from joint_graph import NO_CACHE, ReferenceInterpreter, Split, apply, copy_graph, random_inputs, run
from torch import fx, nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses import FakeTensorMode

from fp8_compile import Config
from fp8_compile.backend.graph import compile_graph
from fp8_compile.kernels.delayed_scaling import COUNTERS, next_scales_op, record_op, update_op
from fp8_compile.kernels.gpu.update_scales import ALGORITHMS
from fp8_compile.passes.graph.emit import emit, getitem
from fp8_compile.passes.graph.marks import Kind, Mark
from fp8_compile.passes.split.update_in_place import UpdateInPlace

aten = torch.ops.aten
FUNCTIONAL = {"next_scales", "update_scales", "record_amaxes", "copy_"}
RULE = (448.0, "max", 1)


def halves(model: nn.Module, target: str) -> Split:
    """Forward and backward as they come from the partitioner. Code for a GPU is compiled when it first runs, which is
    when the histories are there: in the second step."""
    found: list[fx.Graph] = []

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        found.append(copy_graph(gm.graph))
        return make_boxed_func(lambda *inputs: ReferenceInterpreter(gm).run(*inputs))

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        config = Config(target=target, inductor=NO_CACHE)
        compiled, report = compile_graph(gm, example_inputs, config, inner_compile=inner)
        reports.append(report)
        return compiled

    reports: list[Any] = []
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        compiled(torch.randn(16, 32, requires_grad=True)).sum().backward()
    forward, backward = found
    return Split(forward, backward, reports[0])


def stack(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(layers)))


@pytest.fixture(scope="module", params=["cpu", "cuda:90"])
def one_layer(request: pytest.FixtureRequest) -> Split:
    torch._dynamo.reset()
    return halves(stack(1), request.param)


@pytest.fixture(scope="module", params=["cpu", "cuda:90"])
def three_layers(request: pytest.FixtureRequest) -> Split:
    torch._dynamo.reset()
    return halves(stack(3), request.param)


def in_place(graph: fx.Graph) -> tuple[fx.Graph, int]:
    done = copy_graph(graph)
    return done, apply(UpdateInPlace(), done)


def state_inputs(graph: fx.Graph, seed: int) -> list[Any]:
    """Random inputs, with a state of which some slots know a scale and some have an amax pending."""
    generator = torch.Generator().manual_seed(seed)
    inputs = random_inputs(graph, seed)
    places = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    for node in graph.find_nodes(op="call_function", target=next_scales_op):
        amaxes, history, scales, counts = (inputs[places[arg]] for arg in node.args[:4])
        amaxes.fill_(-1.0)[:2] = torch.tensor([3.0, -1.0])
        history.copy_(torch.rand(history.shape, generator=generator))
        scales[0], scales[1] = 8.0, 0.125
        counts.zero_()[:COUNTERS] = 5
    return inputs


# --- what is in the graph


def test_one_update_at_the_start_and_one_record_at_the_end_of_each_half(three_layers: Split) -> None:
    for graph, slots in ((three_layers.forward, 6), (three_layers.backward, 3)):
        before = ops(graph)
        assert [before[op] for op in ("next_scales", "update_scales", "record_amaxes", "copy_")] == [1, 1, 1, 5]
        after, changes = in_place(graph)
        assert changes == 1 and not FUNCTIONAL & set(ops(after))
        assert (ops(after)["update_scales_"], ops(after)["record_amaxes_"]) == (1, 1)
        calls = [op_name(node) for node in after.nodes if node.op == "call_function"]
        assert calls[:2] == ["empty_like", "update_scales_"], "nothing may read or write the state before"
        (record,) = [node for node in after.nodes if op_name(node) == "record_amaxes_"]
        assert len(record.args[1]) == len(record.args[2]) == slots
        found = calls.count("amax") + calls.count("quantize_delayed")
        assert len(set(record.args[1])) == slots == found


def test_each_half_writes_to_its_own_page_and_to_no_other(three_layers: Split) -> None:
    written = {}
    for name, graph in (("forward", three_layers.forward), ("backward", three_layers.backward)):
        (update,) = [node for node in in_place(graph)[0].nodes if op_name(node) == "update_scales_"]
        (record,) = [node for node in in_place(graph)[0].nodes if op_name(node) == "record_amaxes_"]
        written[name] = {arg.name for arg in update.args[:5]}
        assert record.args[0].name == update.args[0].name, "what is recorded here is read by the next update here"
        assert update.args[6] == {"forward": 448.0, "backward": 57344.0}[name]
    assert len(written["forward"]) == len(written["backward"]) == 5
    assert not written["forward"] & written["backward"]


def test_golden_of_the_state_in_both_halves(one_layer: Split) -> None:
    kept = ("update_scales_", "record_amaxes_", "empty_like")
    text = "".join(
        render(in_place(graph)[0], lambda node: op_name(node) in kept).rpartition("return")[0]
        for graph in (one_layer.forward, one_layer.backward)
    )
    # On a CPU one call of C++ gives the amax, and on a GPU Inductor fuses it.
    read = {"cpu": r"quantize_delayed(_\d)?\[3\]", "cuda:90": r"amax(_\d)?"}[one_layer.report.target]
    text, recorded = re.subn(rf"(?<=[\[ ]){read}(?=[,\]])", "<amax>", text)
    assert recorded == 3
    expecttest.assert_expected_inline(text, """\
empty_like: f32[2, 32] = empty_like(primals_5)
update_scales_: None = update_scales_(primals_3, primals_4, primals_5, primals_6, primals_7, empty_like, 448.0, max,
    1)
record_amaxes_: None = record_amaxes_(primals_3, [<amax>, <amax>], [0, 1])
empty_like: f32[2, 32] = empty_like(primals_10)
update_scales_: None = update_scales_(primals_8, primals_9, primals_10, primals_11, primals_12, empty_like, 57344.0,
    max, 1)
record_amaxes_: None = record_amaxes_(primals_8, [<amax>], [0])
""")


def test_a_graph_without_state_is_left_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = FakeTensorMode().from_tensor(torch.ones(3))
    graph.output([emit(graph, aten.relu.default, x, like=x)])
    before = render(graph)
    assert apply(UpdateInPlace(), graph) == 0 and render(graph) == before


# --- its numbers


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_results_and_state_are_the_same_bits_as_before(three_layers: Split, half: str) -> None:
    graph = getattr(three_layers, half)
    after, _ = in_place(graph)
    inputs = [state_inputs(graph, seed=1) for _ in range(2)]
    for one, two in zip(run(graph, inputs[0]), run(after, inputs[1]), strict=True):
        assert (one is two is None) or torch.equal(one, two)
    for one, two in zip(*inputs):
        assert torch.equal(one, two), "the state after the pass"
    changed = [not torch.equal(one, two) for one, two in zip(inputs[0], state_inputs(graph, seed=1))]
    assert sum(changed) == 4, "all four tensors of the page, and nothing else"


# --- for a GPU, on a graph by hand: fake tensors need no device


def on_a_gpu(rule: tuple[float, str, int] = RULE) -> fx.Graph:
    graph, mode = fx.Graph(), FakeTensorMode()
    shapes = {"amaxes": (8,), "history": (8, 16), "scales": (2, 8), "counts": (7, 8), "room": (1,)}
    shapes |= {"x": (16, 32), "y": (16, 32)}
    state = []
    for name, shape in shapes.items():
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(
                shape, device="cuda", dtype=torch.int32 if name in ("counts", "room") else torch.float32
            )
        state.append(node)
    *state, x, y = state
    known = emit(graph, next_scales_op, *state, *rule, like=x)
    recorded = []
    for tensor in (x, y):
        magnitude = emit(graph, aten.abs.default, tensor, like=x, mark=Mark(kind=Kind.SCALES))
        recorded.append(emit(graph, aten.amax.default, magnitude, [0, 1], True, like=x, mark=Mark(kind=Kind.SCALES)))
    scale = emit(graph, aten.select.int, known, 0, 0, like=x)
    new = emit(graph, update_op, *state, *rule, like=x)
    results = [getitem(graph, new, index) for index in range(4)]
    amaxes = emit(graph, record_op, state[0], recorded, [3, 5], [known], like=x)
    for old, result in zip((*state[1:], state[0]), (*results, amaxes)):
        emit(graph, aten.copy_.default, old, result, like=x)
    graph.output([scale])
    return graph


def test_golden_for_a_gpu() -> None:
    graph = on_a_gpu()
    assert apply(UpdateInPlace(), graph) == 1
    (launch,) = [node for node in graph.nodes if op_name(node) == "triton_kernel_wrapper_mutation"]
    assert kernel_side_table.get_kernel(launch.kwargs["kernel_idx"]).__name__ == "update_scales_kernel"
    assert [node.name for node in launch.kwargs["kwargs"].values() if isinstance(node, fx.Node)][:5] == [
        "amaxes", "history", "scales", "counts", "room",
    ]  # fmt: skip
    lines = render(graph, lambda node: op_name(node) in ("empty_like", "select", "record_amax", "amax"))
    expecttest.assert_expected_inline(lines, """\
empty_like: f32[2, 8] = empty_like(scales)
record_amax: None = record_amax(amaxes, x, 3)
record_amax_1: None = record_amax(amaxes, y, 5)
select: f32[8] = select(empty_like, 0, 0)
return select
""")


def test_for_a_gpu_the_tensors_are_recorded_where_they_are_made_and_no_amax_is_left() -> None:
    graph = on_a_gpu()
    apply(UpdateInPlace(), graph)
    assert not {"abs", "amax", "copy_", "next_scales", "update_scales", "record_amaxes"} & set(ops(graph))
    recorded = [node.args for node in graph.nodes if op_name(node) == "record_amax"]
    assert [(str(amaxes), str(x), row) for amaxes, x, row in recorded] == [("amaxes", "x", 3), ("amaxes", "y", 5)]


def test_frozen_scales_on_a_gpu_are_counted_and_recorded_by_the_same_kernel() -> None:
    graph = on_a_gpu((448.0, "frozen", 1))
    apply(UpdateInPlace(), graph)
    (launch,) = [node for node in graph.nodes if op_name(node) == "triton_kernel_wrapper_mutation"]
    constants = kernel_side_table.get_constant_args(launch.kwargs["constant_args_idx"])
    assert constants["ALGORITHM"] == ALGORITHMS["frozen"] and ops(graph)["record_amax"] == 2
