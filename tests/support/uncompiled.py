"""A backend that runs our joint-graph passes and then interprets the graphs instead of compiling them.

The graphs, and so the numerics, are those that Inductor would get; a test takes a second, not half a minute.
What only exists behind Inductor (the passes on the split graphs, generated code, caches) needs the real backend.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch import fx, nn

from fp8_compile import Config, Report
from fp8_compile.backend.graph import compile_graph
from fp8_compile.backend.interpret import run_uncompiled

NO_CACHE = {"force_disable_caches": True}
# Inductor writes its code anew, today's and not a cached one; C++ of the same text is not compiled a second time.
CODE_ANEW = {"fx_graph_cache": False}


class UncompiledBackend:
    """``torch.compile(model, backend=UncompiledBackend(Config(...)))``; ``.reports`` as of the real one."""

    def __init__(self, config: Config | None = None) -> None:
        config = config or Config()
        self.config = config.replace(inductor={**config.inductor, **NO_CACHE})
        self.reports: list[Report] = []
        self.codes: list[Any] = []

    def __deepcopy__(self, memo: Any) -> UncompiledBackend:
        return self  # Lightning copies what torch.compile is called with

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, report = compile_graph(gm, example_inputs, self.config, inner_compile=run_uncompiled)
        self.reports.append(report)
        self.codes.append(compiled)
        return compiled


def compile_uncompiled(model: nn.Module, recipe: str, **options: Any) -> tuple[Any, UncompiledBackend]:
    """The model compiled by it, and the backend to ask."""
    backend = UncompiledBackend(Config(recipe=recipe, **options))
    return torch.compile(model, backend=backend, fullgraph=True), backend
