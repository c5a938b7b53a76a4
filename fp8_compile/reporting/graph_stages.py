"""Compiled graphs as columns of plain data: what the report page draws.

A stage is one graph at one moment: ``before`` (as it came in), ``rewritten`` (quantizes and FP8 gemms in place),
``lowered`` (after all passes), ``forward`` and ``backward`` (after the split). In JSON every text is an index into
``strings``:

    {"strings": ["", "mm", "bf16", ...],
     "stages": [{"id": "before", "title": "...", "name": [1, ...], "kind": [...], ..., "bytes": [8192, ...],
                 "inputs": [[0, 1], ...]}]}
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, Iterable, Mapping, Sequence

from torch import fx

from fp8_compile.passes.graph.marks import mark_of
from fp8_compile.passes.graph.roles import Names
from fp8_compile.passes.graph.row import code_line
from fp8_compile.torch_internals.aot import saved_positions

from .precision_graph import attributes, phase_of, printable, tensors_of

TEXTS = ("name", "kind", "target", "precision", "shape", "module", "gemm", "phase", "site", "slot", "code")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A graph at one moment; ``columns[field][i]`` and ``inputs[i]`` belong to node ``i``."""

    id: str
    title: str
    columns: dict[str, list[Any]]
    inputs: list[list[int]]

    def __len__(self) -> int:
        return len(self.inputs)

    @functools.cached_property
    def by_name(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.columns["name"])}

    def is_symbolic(self, index: int) -> bool:
        """True if the bytes of a node are unknown because one of its sizes is."""
        return not self.columns["bytes"][index] and any(map(str.isalpha, self.columns["shape"][index]))


def capture(graph: fx.Graph, id: str, title: str, names: Names | None = None) -> Stage:
    """Record the graph as it is now. ``names`` knows parameters, and the modules of nodes that were not rewritten."""
    columns: dict[str, list[Any]] = {field: [] for field in (*TEXTS, "bytes")}
    inputs: list[list[int]] = []
    index_of: dict[fx.Node, int] = {}
    for node in graph.nodes:
        index_of[node] = len(inputs)
        inputs.append([index_of[producer] for producer in node.all_input_nodes])
        fields = attributes(node)
        fields["name"] = fields["label"]
        fields["phase"] = phase_of(node, {columns["phase"][index] for index in inputs[-1]})
        fields["site"] = printable(mark_of(node).site)
        fields["slot"] = printable(mark_of(node).use or "")
        fields["code"] = printable(code_line(node))
        if not fields["module"] and names is not None and node.op == "call_function":
            fields["module"] = printable(names.module_of(node))
        elif names is not None and node.op == "placeholder":
            fields["module"] = printable(next(iter(names.parameters_of(node)), ""))
        for field, column in columns.items():
            column.append(fields[field])
    return Stage(id, title, columns, inputs)


def mark_sites(stage: Stage, gemms: Mapping[str, str], rewritten: set[str]) -> None:
    """Mark the nodes that are ``gemms`` of the report (node -> which gemm). That is known only after the rewrite, when
    ``before`` has been captured already. A plain product that replaces an FP8 gemm (on a CPU, tiles are scaled before
    they are multiplied) counts as an FP8 gemm."""
    columns = stage.columns
    for index, name in enumerate(columns["name"]):
        if name in gemms and stage.id == "before":
            columns["site"][index], columns["gemm"][index] = name, gemms[name]
            if columns["kind"][index] == "view":  # the getitem of an operation that computes two products
                columns["kind"][index] = "matmul"
        elif columns["kind"][index] == "matmul" and columns["site"][index] in rewritten:
            columns["kind"][index] = "fp8_matmul"


def name_slots(stage: Stage, names: Mapping[str, str]) -> None:
    """Give quantized tensors the names that the scaling state has for them, known once the graph is compiled."""
    column = stage.columns["slot"]
    column[:] = [slot if slot in names.values() else names.get(slot, "") for slot in column]


def slots_by_site(stage: Stage) -> dict[str, list[str]]:
    """Return, for each matmul, the slots of the tensors that its FP8 gemms read, left and right."""
    found: dict[str, dict[str, None]] = collections.defaultdict(dict)
    kinds, slots = stage.columns["kind"], stage.columns["slot"]
    for index, kind in enumerate(kinds):
        if kind == "fp8_matmul":
            for operand in stage.inputs[index][:2]:
                if (quantize := _quantize_of(stage, operand)) is not None and slots[quantize]:
                    found[stage.columns["site"][index]][slots[quantize]] = None
    return {site: list(names) for site, names in found.items()}


def _quantize_of(stage: Stage, index: int) -> int | None:
    """Return the quantize that an FP8 operand comes from, through views and copies in another layout."""
    while stage.columns["kind"][index] != "quantize":
        if not stage.inputs[index]:
            return None
        index = stage.inputs[index][0]
    return index


def saved_for_backward(graph: fx.Graph) -> dict[str, int] | None:
    """Return how many bytes a forward graph keeps for its backward: ``all`` of them, those in ``fp8``, and
    ``fp8_before``, which is what the latter would take in the dtype that they were quantized from. Parameters and
    inputs exist anyway and do not count. None if it is not a forward graph, or if a size is known only at run time."""
    output = graph.output_node()
    saved = saved_positions(output)
    if not saved:
        return None
    total = fp8 = before = 0
    for node in (output.args[0][index] for index in saved):  # type: ignore[index]
        if not isinstance(node, fx.Node) or node.op == "placeholder":
            continue
        for tensor in tensors_of(node):
            if not isinstance(size := tensor.numel(), int):
                return None
            total += size * tensor.element_size()
            if tensor.element_size() == 1 and tensor.is_floating_point():
                fp8 += size
                before += size * _width_before(node)
    return {"all": total, "fp8": fp8, "fp8_before": before}


def _width_before(node: fx.Node) -> int:
    """Bytes an element of the tensor that an FP8 one was made from: the largest that enters what the rewrite put there
    for this matmul."""
    site, sources = mark_of(node).site, []
    queue, seen = [node], {node}
    for one in queue:
        for producer in one.all_input_nodes:
            if site and mark_of(producer).site == site:
                queue += [producer] if producer not in seen else []
                seen.add(producer)
            else:
                sources += [tensor for tensor in tensors_of(producer) if tensor.is_floating_point()]
    return max(sources, key=lambda tensor: tensor.numel()).element_size() if sources else 1


def encode(stages: Sequence[Stage]) -> dict[str, Any]:
    """Plain data for JSON; :func:`decode` reads it back."""
    strings: dict[str, int] = {"": 0}
    encoded = []
    for stage in stages:
        columns = {
            field: [strings.setdefault(text, len(strings)) for text in stage.columns[field]] for field in TEXTS
        }
        encoded.append(
            {"id": stage.id, "title": stage.title, **columns, "bytes": stage.columns["bytes"], "inputs": stage.inputs}
        )
    return {"strings": list(strings), "stages": encoded}


def decode(data: dict[str, Any]) -> list[Stage]:
    strings: Sequence[str] = data["strings"]

    def texts(column: Iterable[int]) -> list[str]:
        return [strings[index] for index in column]

    return [
        Stage(
            stage["id"],
            stage["title"],
            {**{field: texts(stage[field]) for field in TEXTS}, "bytes": stage["bytes"]},
            stage["inputs"],
        )
        for stage in data["stages"]
    ]
