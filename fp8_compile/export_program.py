"""The rewritten graph as an ``ExportedProgram``, for those who lower it further themselves."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import nn
from torch.export import ExportedProgram

from .module_names import ModuleNames
from .passes.multiply_packed import MultiplyPacked


def traced(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    """``torch.export``'s graph of a call."""
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    with torch.no_grad():
        return torch.export.export(model, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes)


def rewritten(program: ExportedProgram) -> ExportedProgram:
    """A program in core ATen, with products of packed weights as ``fp8_compile::nvfp4_mm`` and ``fp8_compile::fp8_mm``.

    It passes torch's verifier and goes through ``torch.export.save`` and ``load``, where fp8_compile is imported.
    """
    program = program.run_decompositions()
    MultiplyPacked(ModuleNames({}, [], [])).run(program.graph)
    program.graph.eliminate_dead_code()
    program.graph.lint()
    program.graph_module.recompile()
    program.validate()
    return program
