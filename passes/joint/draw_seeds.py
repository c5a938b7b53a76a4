"""Draw the seeds of all quantizes of a graph together."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8_compile.kernels.nvfp4_training import quantize_nvfp4_op

from ..graph.arguments import arguments, input_of
from ..graph.emit import emit
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten
SEED = 5  # which argument of the quantize


class DrawSeeds(GraphPass):
    """Make the seeds of stochastic rounding one tensor.

    Before:  seed = randint(0, 2**31 - 1, [1])                            for each quantize
    After:   seeds = randint(0, 2**31 - 1, [count]);  seed = seeds[i:i+1]

    Each seed would be a small kernel of its own on a GPU. On a CPU Inductor fuses it into whatever kernel is beside it,
    and layers that are alike would have code of their own to compile.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        quantizes = graph.find_nodes(op="call_function", target=quantize_nvfp4_op)
        seeds = dict.fromkeys(input_of(node, SEED) for node in quantizes if arguments(node)[SEED] is not None)
        drawn = [seed for seed in seeds if seed.target is aten.randint.low]
        if len(drawn) < 2:
            return PassReport(0, "seeds drawn together")
        first = next(node for node in graph.nodes if node in seeds)
        least, most, _ = arguments(first)
        options: dict[str, Any] = dict(first.kwargs)
        with graph.inserting_before(first):
            together = emit(graph, aten.randint.low, least, most, [len(drawn)], like=first, **options)
        for index, seed in enumerate(drawn):
            with graph.inserting_before(seed):
                part = emit(graph, aten.slice.Tensor, together, 0, index, index + 1, like=first)
            seed.replace_all_uses_with(part)
            graph.erase_node(seed)
        return PassReport(len(drawn), "seeds drawn together")
