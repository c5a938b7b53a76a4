"""The seeds of a graph's stochastic rounding become parts of one tensor, which is drawn once."""

from __future__ import annotations

import torch
from graph_text import ops
from joint_graph import apply
from torch import fx
from torch._subclasses import FakeTensorMode

from fp8_compile.kernels.nvfp4_training import quantize_nvfp4_op
from fp8_compile.passes.graph.emit import emit, getitem
from fp8_compile.passes.joint.draw_seeds import SEED, DrawSeeds

aten = torch.ops.aten
SEEDS = 2**31 - 1


def quantizing(seeds: list[int | None]) -> fx.Graph:
    """A graph that quantizes its input once for each item: with the seed of that number, or without one."""
    graph, mode = fx.Graph(), FakeTensorMode()
    x, enc = graph.placeholder("x"), graph.placeholder("enc")
    for node, shape in ((x, (32, 32)), (enc, (1, 1))):
        node.meta.update(val=mode.from_tensor(torch.empty(shape)), seq_nr=7)
    drawn: dict[int, fx.Node] = {}
    made = []
    for number in seeds:
        if number is not None and number not in drawn:
            options = {"device": torch.device("cpu"), "pin_memory": False}
            drawn[number] = emit(graph, aten.randint.low, 0, SEEDS, [1], like=x, **options)
        seed = None if number is None else drawn[number]
        node = emit(graph, quantize_nvfp4_op, x, enc, [1, 16], False, False, seed, 0, False, like=x)
        made.append(getitem(graph, node, 0))
    graph.output(made)
    return graph


def seeds_of(graph: fx.Graph) -> list[fx.Node | None]:
    return [node.args[SEED] for node in graph.find_nodes(op="call_function", target=quantize_nvfp4_op)]


def test_seeds_are_parts_of_one_tensor_and_shared_ones_stay_shared() -> None:
    graph = quantizing([0, None, 1, 0, 2])
    assert apply(DrawSeeds(), graph) == 3
    (drawn,) = graph.find_nodes(op="call_function", target=aten.randint.low)
    assert drawn.args == (0, SEEDS, [3]) and tuple(drawn.meta["val"].shape) == (3,)
    first, none, second, again, third = seeds_of(graph)
    assert none is None and first is again
    assert [seed.args for seed in (first, second, third)] == [(drawn, 0, i, i + 1) for i in range(3)]
    graph.lint()


def test_what_has_one_seed_or_none_is_left_alone() -> None:
    for seeds in ([0, 0], [None, None]):
        graph = quantizing(seeds)
        before = ops(graph)
        assert apply(DrawSeeds(), graph) == 0
        assert ops(graph) == before
