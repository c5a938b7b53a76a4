"""A product with a packed weight, as a place in the graph: what all kinds of them have in common."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Protocol

import torch
from torch import fx

from fp8_compile.torch_internals.graphs import op_name

from ..graph.emit import emit, value
from ..graph.roles import Names
from ..graph.row import REWRITTEN, Gemm, Row, code_line
from .packed_formats import Inputs, PackedFormat

aten, prims = torch.ops.aten, torch.ops.prims
CASTS = (prims.convert_element_type.default, aten._to_copy.default)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class StackNames(Names, Protocol):
    """Names of buffers, too: packed stacks have no module of their own in the graph."""

    def buffers_of(self, placeholder: fx.Node) -> tuple[str, ...]: ...


@dataclasses.dataclass(frozen=True)
class PackedProduct(abc.ABC):
    """``node = x @ dequantize(...).T``, in some form; of a gradient, ``node = grad @ dequantize(...)``."""

    node: fx.Node
    gemm: ClassVar[Gemm] = "output"

    @property
    @abc.abstractmethod
    def format(self) -> PackedFormat: ...

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int | torch.SymInt, ...]:
        """As a row has it."""

    @abc.abstractmethod
    def inputs(self, target: str) -> Inputs: ...

    @abc.abstractmethod
    def reason(self, inputs: Inputs) -> str:
        """What the report says."""

    @abc.abstractmethod
    def weight(self, names: StackNames, module: str) -> str:
        """The name of the packed weight's codes."""

    @abc.abstractmethod
    def emit(self, graph: fx.Graph, target: str) -> fx.Node:
        """The product that reads the packed form, at the graph's insertion point."""

    def row(self, names: StackNames, module: str, target: str) -> Row:
        inputs = self.inputs(target)
        return Row(
            module,
            self.gemm,
            tuple(size if isinstance(size, int) else str(size) for size in self.shape),
            REWRITTEN,
            self.reason(inputs),
            op=op_name(self.node),
            weight=self.weight(names, module),
            formats=(inputs.format, self.format.values),
            node=self.node.name,
            code=code_line(self.node),
        )

    def replace(self, graph: fx.Graph, target: str) -> None:
        with graph.inserting_before(self.node):
            result = self.emit(graph, target)
        self.node.replace_all_uses_with(result)
        graph.erase_node(self.node)


def cast(graph: fx.Graph, x: fx.Node, dtype: torch.dtype, *, like: fx.Node) -> fx.Node:
    """x in a dtype: itself where it has it."""
    return x if value(x).dtype == dtype else emit(graph, prims.convert_element_type.default, x, dtype, like=like)
