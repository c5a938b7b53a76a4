"""The rewritten graph as an ``ExportedProgram``, for those who lower it further themselves."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from fp8_compile.backend.graph import new_dump
from fp8_compile.backend.module_names import ModuleNames
from fp8_compile.config import Config
from fp8_compile.report import Report
from fp8_compile.torch_internals.graphs import schema_name, schema_of

from .pipelines import ProgramPipeline, inference_rules


def traced(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    """``torch.export``'s graph of a call."""
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    with torch.no_grad():
        return torch.export.export(model, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes)


def rewritten(program: ExportedProgram, names: ModuleNames, config: Config) -> ExportedProgram:
    """A program in core ATen, products of packed weights as ``fp8_compile::nvfp4_mm``, ``fp8_mm`` and ``scaled_mm``.

    It passes torch's verifier and goes through ``torch.export.save`` and ``load``, where fp8_compile is imported.
    """
    program = program.run_decompositions()
    dump = new_dump(config, names)
    pipeline = ProgramPipeline(inference_rules(config), names, dump)
    pipeline(program.graph)
    program.graph_module.recompile()
    program.validate()
    if dump:
        dump.write_report(Report(tuple(pipeline.rows), "packed", "cpu", cache="off"))
    return program


def writes_a_number(program: ExportedProgram) -> bool:
    """True if a call may change a buffer of a single number, such as a count of tokens."""
    named, buffers = program.graph_signature.inputs_to_buffers, dict(program.named_buffers())
    reached = {node for node in program.graph.nodes if node.name in named and buffers[named[node.name]].numel() == 1}
    for node in program.graph.nodes:
        if not schema_name(node) or reached.isdisjoint(node.all_input_nodes):
            continue
        schema = schema_of(node.target)
        for argument, given in zip(schema.arguments, node.args):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(given, fx.Node) and given in reached:
                return True
        if any(one.alias_info is not None for one in schema.returns):
            reached.add(node)
    return False
