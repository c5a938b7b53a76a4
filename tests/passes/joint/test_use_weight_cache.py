"""Graphs read FP8 weights from inputs: nothing is quantized, turned or saved for them."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import pytest
import torch
from graph_text import ops
from joint_graph import NO_CACHE, ReferenceInterpreter, copy_graph
from torch import fx, nn
from torch._functorch.aot_autograd import make_boxed_func

from fp8_compile import Config
from fp8_compile.backend.graph import compile_graph
from fp8_compile.scaling.model_state import request
from fp8_compile.torch_internals.aot import named_inputs


class Layers(nn.Module):
    """A plain layer, one that takes round sizes only when padded, and one that the options exclude."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(32, 48, bias=False)
        self.odd = nn.Linear(48, 40, bias=False)
        self.spared = nn.Linear(40, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.spared(self.odd(self.plain(x)))


def halves(target: str, cached: bool) -> tuple[fx.Graph, fx.Graph]:
    """Forward and backward, before the passes on each. Code for a GPU is compiled in the second step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Layers()
    request(model).cached = cached
    found: list[fx.Graph] = []

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        found.append(copy_graph(gm.graph))
        return make_boxed_func(lambda *inputs: ReferenceInterpreter(gm).run(*inputs))

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        config = Config(target=target, exclude=("spared",), inductor=NO_CACHE)
        return compile_graph(gm, example_inputs, config, inner_compile=inner)[0]

    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        compiled(torch.randn(16, 32, requires_grad=True)).sum().backward()
    forward, backward = found
    return forward, backward


def named(graph: fx.Graph) -> dict[str, fx.Node]:
    return {name: node for name, node in named_inputs(graph).items() if "fp8_weight" in name}


def casts_to_fp8(graph: fx.Graph) -> int:
    values = (node.meta.get("val") for node in graph.nodes if node.op == "call_function")
    kinds = [value.dtype for value in values if isinstance(value, torch.Tensor)]
    return sum(kind in (torch.float8_e4m3fn, torch.float8_e5m2) for kind in kinds)


def test_on_a_gpu_forward_reads_the_codes_and_backward_the_transposed_ones() -> None:
    forward, backward = halves("cuda:90", cached=True)
    buffers = named(forward)
    read = {name for name, node in buffers.items() if node.users}
    # Arguments 0, 1, 2 are the weights or x, in the order in which Dynamo met them; the excluded layer has no reader.
    codes = sorted(name for name in read if name.endswith("codes"))
    assert len(codes) == 2 and len([name for name in read if name.endswith("scales")]) == 2
    plain_forward, plain_backward = halves("cuda:90", cached=False)
    assert ops(forward)["_scaled_mm"] == ops(plain_forward)["_scaled_mm"] == 2
    assert ops(backward)["_scaled_mm"] == ops(plain_backward)["_scaled_mm"] == 4
    assert casts_to_fp8(forward) < casts_to_fp8(plain_forward)


def test_where_any_layout_is_read_the_codes_are_all_that_is_cached() -> None:
    forward, backward = halves("cuda:100", cached=True)
    buffers = named(forward)
    assert not any(name.endswith("transposed") for name in buffers)
    read = {node.name for name, node in buffers.items() if node.users and name.endswith("codes")}
    assert len(read) == 2
    # Backward of the odd layer reads the padded copy that forward makes.
    assert len(read & {node.name for node in backward.find_nodes(op="placeholder")}) == 1


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_no_amax_of_a_weight_is_recorded_and_no_copy_of_it_is_saved(target: str) -> None:
    cached, plain = (halves(target, cached=cached)[0] for cached in (True, False))

    def recorded(graph: fx.Graph) -> int:
        (record,) = [node for node in graph.nodes if "record_amaxes" in str(node.target)]
        return len(record.args[2])

    assert (recorded(cached), recorded(plain)) == (2, 4), "two inputs; and their two weights"
    returned = [node for node in cached.output_node().args[0] if isinstance(node, fx.Node) and node.op != "placeholder"]
    weights = [node for node in returned if tuple(node.meta["val"].shape) in {(48, 32), (32, 48), (40, 48), (48, 40)}]
    assert weights == []
