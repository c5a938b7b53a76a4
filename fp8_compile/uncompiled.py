"""Run a graph as it is, without compiling it."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from torch import fx
from torch._functorch.aot_autograd import make_boxed_func

# Nothing is generated, so nothing may come from or go to a cache.
NO_CACHE = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "force_disable_caches": True}


def run_uncompiled(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """An ``inner_compile`` for Inductor that interprets the graph."""
    return make_boxed_func(gm.forward)
