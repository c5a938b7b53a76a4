"""A tensor is quantized once, however many gemms read it."""

from __future__ import annotations

from typing import Any

import torch
from graph_text import op_name, ops
from joint_graph import apply, joint_graph, make, random_inputs, run, run_passes
from module_of import ModuleOf
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fp8_compile.kernels.quantize import quantize_op
from fp8_compile.passes.graph.emit import emit, getitem
from fp8_compile.passes.joint.share_quantizes import ShareQuantizes

aten, prims = torch.ops.aten, torch.ops.prims
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WHOLE = (-1, -1)


class Graph:
    """A graph with one input that is quantized in several ways."""

    def __init__(self, *shape: int) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = FakeTensorMode().from_tensor(torch.empty(shape))
        self.results: list[fx.Node] = []

    def call(self, op: Any, *args: Any) -> fx.Node:
        return emit(self.graph, op, *args, like=self.x)

    def quantize(
        self, x: fx.Node, dtype: torch.dtype = E4M3, block: tuple[int, int] = WHOLE, region: int | None = None
    ) -> None:
        node = self.call(quantize_op, x, dtype, list(block))
        if region is not None:
            node.meta["ac_graph_id"] = region  # inherited by what reads it
        self.results += [getitem(self.graph, node, index) for index in (0, 1)]

    def share(self) -> tuple[int, int]:
        """Quantizes merged, quantizes left."""
        self.graph.output(self.results)
        merged = apply(ShareQuantizes(), self.graph)
        return merged, ops(self.graph)["quantize"]


def test_equal_quantizes_of_one_tensor_become_one() -> None:
    made = Graph(8, 32)
    for _ in range(3):
        made.quantize(made.x)
    assert made.share() == (2, 1)
    first, scale, *others = made.graph.output_node().args[0]
    assert others == [first, scale] * 2


def test_equal_views_and_casts_are_seen_through() -> None:
    made = Graph(2, 4, 32)
    for _ in range(2):
        half = made.call(prims.convert_element_type.default, made.x, torch.bfloat16)
        made.quantize(made.call(aten.view.default, half, [8, 32]))
    assert made.share() == (1, 1)
    assert ops(made.graph) == {"to": 1, "view": 1, "quantize": 1, "getitem": 2}


def test_other_views_and_casts_are_kept_apart() -> None:
    made = Graph(8, 32)
    made.quantize(made.x)
    made.quantize(made.call(aten.view.default, made.x, [16, 16]))
    made.quantize(made.call(aten.permute.default, made.x, [1, 0]))
    made.quantize(made.call(prims.convert_element_type.default, made.x, torch.bfloat16))
    made.quantize(made.call(prims.convert_element_type.default, made.x, torch.float16))
    assert made.share() == (0, 5)


def test_other_formats_and_blocks_are_kept_apart() -> None:
    made = Graph(8, 32)
    for dtype, block in ((E4M3, WHOLE), (E5M2, WHOLE), (E4M3, (1, -1)), (E4M3, (-1, 1)), (E4M3, (1, 128))):
        made.quantize(made.x, dtype, block)
    assert made.share() == (0, 5)


def test_values_that_are_computed_twice_are_not_compared() -> None:
    made = Graph(8, 32)
    for _ in range(2):
        made.quantize(made.call(aten.sin.default, made.x))
    assert made.share() == (0, 2)


def test_two_checkpointed_regions_do_not_share() -> None:
    made = Graph(8, 32)
    made.quantize(made.x, region=1)
    made.quantize(made.x, region=2)
    assert made.share() == (0, 2)


def test_backward_reads_the_quantize_of_a_checkpointed_region() -> None:
    made = Graph(8, 32)
    made.quantize(made.x, region=1)
    made.quantize(made.x)
    assert made.share() == (1, 1)


def test_a_checkpointed_region_does_not_read_what_lies_outside() -> None:
    made = Graph(8, 32)
    made.quantize(made.x)
    made.quantize(made.x, region=1)
    assert made.share() == (0, 2)


def test_gemms_of_one_region_share_though_another_region_came_first() -> None:
    made = Graph(8, 32)
    made.quantize(made.x, region=1)
    for _ in range(3):
        made.quantize(made.x, region=2)
    assert made.share() == (2, 2)


def test_sharing_changes_no_number() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.a(x)) * self.b(x)

    joint = joint_graph(Branches(), torch.randn(2, 8, 32, requires_grad=True))
    for recipe in ("tensorwise", "rowwise"):
        _, rewritten, shared, *_ = run_passes(joint, make("cpu", recipe=recipe))
        inputs = random_inputs(joint.graph)
        for one, other in zip(run(rewritten.graph, inputs), run(shared.graph, inputs), strict=True):
            assert torch.equal(one, other)


def test_a_layer_used_inside_and_outside_of_a_checkpoint_is_quantized_in_each() -> None:
    def checkpointed(self: ModuleOf, x: Tensor) -> Tensor:
        outside = torch.sin(self.layer(x))
        return outside + checkpoint(lambda x: torch.sin(self.layer(x)), x, use_reentrant=False)

    model = ModuleOf(checkpointed, layer=nn.Linear(32, 32, bias=False))
    joint = joint_graph(model, torch.randn(2, 8, 32, requires_grad=True))
    shared = run_passes(joint, make("cpu"))[2].graph
    quantizes = [node for node in shared.nodes if op_name(node) == "quantize"]
    outside, inside = [node.meta.get("ac_graph_id") for node in quantizes if node.args[0].name == "primals_1"]
    assert outside is None and inside is not None
