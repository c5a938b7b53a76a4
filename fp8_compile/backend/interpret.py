"""Run a graph as it is, without compiling it."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch import fx

from fp8_compile.torch_internals.aot import make_boxed_func
from fp8_compile.torch_internals.autograd import keep_versions

# Nothing is generated, so nothing may come from or go to a cache.
NO_CACHE = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "force_disable_caches": True}


def run_uncompiled(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """An ``inner_compile`` for Inductor that interprets the graph."""
    # Views were traced of results without gaps, and a padded product that is cut off again has some. Inductor's own
    # lowering of a view copies where it has to.
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    gm.recompile()
    inputs = gm.graph.find_nodes(op="placeholder")
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = [inputs.index(copy.args[0]) for copy in copies if copy.args[0] in inputs]
    gpus = [item.device.index for item in example_inputs if isinstance(item, torch.Tensor) and item.is_cuda]

    def run(*args: Any) -> Any:
        # As with compiled code, the graph's device is the current one, for kernels and libraries that ask for it; and
        # autograd does not learn of what a graph writes to its inputs: another forward may have saved them for its
        # backward.
        tensors = [args[index] for index in written if isinstance(args[index], torch.Tensor)]
        with torch.cuda.device(gpus[0] if gpus else -1), keep_versions(tensors):
            return gm.forward(*args)

    return make_boxed_func(run)
