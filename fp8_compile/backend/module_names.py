"""What things in a graph are called in the user's model.

Dynamo gives a node the stack of modules it was traced in, keyed by ``id(module)``, with a path such as
``L['self'].blocks.0`` that is relative to whatever frame was being compiled: after a graph break that is a
submodule. Names here are relative to the compiled model, whichever frame the graph came from.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import sys
from types import FrameType
from typing import Any, Iterable, Mapping, Sequence

from torch import fx, nn

from fp8_compile.output_heads import output_heads
from fp8_compile.torch_internals.aot import attribute_of, input_number
from fp8_compile.torch_internals.dynamo import compiled_root, frame_module, real_input, source_of, variables_in_scope
from fp8_compile.torch_internals.modules import unwrap


@dataclasses.dataclass(frozen=True)
class InputName:
    """One placeholder of the Dynamo graph: a parameter or buffer with its dotted names, an argument of a compiled
    function with its own, or something else."""

    names: tuple[str, ...] = ()  # several where it is tied
    kind: str = "input"  # "parameter", "buffer" or "input"


class ModuleNames:
    """Names of the modules and inputs of one graph."""

    def __init__(
        self,
        modules: dict[int, str],
        inputs: Sequence[InputName],
        known: Iterable[str],
        frame: str = "",
        *,
        include: Sequence[str] = (),
        heads: Mapping[str, str] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._modules, self._inputs, self.frame = modules, list(inputs), frame  # the module of the frame
        self._include, self._shapes = include, shapes or {}
        self.heads = heads or {}  # dotted name of an output head's weight -> the reason against it
        self.known = sorted(set(known))  # every dotted name a pattern may match

    @classmethod
    def of_graph(cls, gm: fx.GraphModule, include: Sequence[str] = ()) -> ModuleNames:
        """Names for a graph that Dynamo hands over, while it is compiling; ``include`` may name weights."""
        modules: dict[int, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        tensors: dict[int, InputName] = {}
        known: list[str] = []
        for prefix, root in visible_roots():
            for name, module in root.named_modules(remove_duplicate=False):
                modules.setdefault(id(module), _join(prefix, name))
                known.append(_join(prefix, name))
            for kind, named in (("parameter", root.named_parameters), ("buffer", root.named_buffers)):
                for name, tensor in named(remove_duplicate=False):
                    before = tensors.get(id(tensor), InputName())
                    tensors[id(tensor)] = InputName((*before.names, _join(prefix, name)), kind)
                    known.append(_join(prefix, name))
                    if kind == "parameter":
                        shapes[_join(prefix, name)] = tuple(tensor.shape)
        placeholders = gm.graph.find_nodes(op="placeholder")
        inputs = [_input_name(node, tensors) for node in placeholders]
        frame = modules.get(id(frame_module()[1]), "")
        heads = _heads(gm, {node: real_input(node) for node in placeholders}, tensors)
        names = cls(modules, inputs, known, frame, include=include, heads=heads, shapes=shapes)
        in_graph = (names.module_of(node) for node in gm.graph.nodes)
        names.known = sorted({*names.known, *in_graph, *(name for item in inputs for name in item.names)} - {""})
        return names

    def module_of(self, node: fx.Node) -> str:
        """Dotted name of the module that a node, forward or backward, was written in."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if not stack:
            return self.frame
        key, (path, _) = list(stack.items())[-1]
        identity = str(key).partition("@")[0]  # "<id>@1": the second call of one module
        if identity.isdigit() and int(identity) in self._modules:
            return self._modules[int(identity)]
        return _join(self.frame, normalise(path))

    def parameters(self) -> dict[int, tuple[str, ...]]:
        """Argument of the graph -> names, of those that are parameters."""
        return {index: item.names for index, item in enumerate(self._inputs) if item.kind == "parameter"}

    def parameters_of(self, placeholder: fx.Node) -> tuple[str, ...]:
        """Dotted names of the parameter that a placeholder of the joint graph stands for, if it does."""
        found = self._input(placeholder)
        return found.names if found.kind == "parameter" else ()

    def weights_of(self, placeholder: fx.Node) -> tuple[str, ...]:
        """The same of what is a weight: a parameter, or a buffer or an argument of a function that ``include`` names.
        A pattern that ends in a wildcard names modules, not each buffer in them."""
        found = self._input(placeholder)
        if found.kind == "parameter":
            return found.names
        patterns = (pattern for pattern in self._include if not set("*?[") & set(pattern.rpartition(".")[2]))
        return found.names if any(fnmatch.filter(found.names, pattern) for pattern in patterns) else ()

    def buffers_of(self, placeholder: fx.Node) -> tuple[str, ...]:
        """The same of a buffer."""
        found = self._input(placeholder)
        return found.names if found.kind == "buffer" else ()

    def is_buffer(self, placeholder: fx.Node) -> bool:
        return self._input(placeholder).kind == "buffer"

    def fingerprint(self, gm: fx.GraphModule) -> str:
        """Names of all nodes and inputs: two models with equal graphs and other names get other code."""
        return repr(([self.module_of(node) for node in gm.graph.nodes], self._inputs, sorted(self.heads.items())))

    def _input(self, placeholder: fx.Node) -> InputName:
        if "desc" not in placeholder.meta:
            return self._input_of_subgraph(placeholder)
        if (attribute := attribute_of(placeholder)) is not None:
            name, is_parameter = attribute
            return InputName((name,), "parameter" if is_parameter else "buffer")
        index = input_number(placeholder)
        return InputName() if index is None or index >= len(self._inputs) else self._inputs[index]

    def _input_of_subgraph(self, placeholder: fx.Node) -> InputName:
        """A branch of ``torch.cond`` gets parameters as inputs without a word of what they are: one that has the shape
        of a matrix of the module that reads it is that matrix."""
        shape = tuple(getattr(placeholder.meta.get("val"), "shape", ()))
        modules = {self.module_of(user) for user in placeholder.users}
        for name, known in self._shapes.items():
            if len(known) > 1 and known == shape and name.rpartition(".")[0] in modules:
                return InputName((name,), "parameter")
        return InputName()


def normalise(path: str) -> str:
    """``L['self'].blocks.0`` and ``L['self']._modules['blocks']._modules['0']`` are both ``blocks.0``.

    A model in a list, ``L['models'][0]``, is ``0``: in a pattern brackets would be a choice of characters.
    """
    path = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", path)
    while path != (outer := re.sub(r"getattr\(([^()]*), '([^']*)'\)", r"\1.\2", path)):
        path = outer
    path = re.sub(r"^[A-Z]\['[^']*'\](?:\.__closure__\[\d+\]\.cell_contents)?", "", path)
    path = re.sub(r"\['?([^'\]]*)'?\]", r".\1", path)
    return path.strip(".")


def visible_roots() -> list[tuple[str, nn.Module]]:
    """(prefix, module): the compiled module; for a compiled function, the modules it can see."""
    root = compiled_root()
    if root is not None:
        return [("", root)]
    seen = {name: item for name, item in variables_in_scope() if isinstance(item, nn.Module)}
    unwrapped = {name: unwrap(module) for name, module in seen.items()}
    distinct = {id(module): (name, module) for name, module in reversed(unwrapped.items())}
    inner = {id(sub) for _, top in distinct.values() for sub in top.modules() if sub is not top}
    tops = [(name, module) for name, module in distinct.values() if id(module) not in inner]
    return [("", tops[0][1])] if len(tops) == 1 else tops


def _heads(
    gm: fx.GraphModule, values: Mapping[fx.Node, Any], tensors: Mapping[int, InputName]
) -> dict[str, str]:
    """Names of the weights of output heads, and why they are. A part of a model that is compiled by itself, a head for
    instance, is judged as what it is in the model, if one of the functions that called it has that at hand."""
    reasons: dict[int, str] = {}
    for _, module in visible_roots():
        reasons |= output_heads(whole_model(module), gm, values)
    return {name: why for key, why in reasons.items() if key in tensors for name in tensors[key].names}


def whole_model(part: nn.Module) -> nn.Module:
    """The largest module that has ``part`` in it, among the variables of the functions that are running."""
    frame: FrameType | None = sys._getframe()
    largest, most = part, 0
    while frame is not None:
        for item in list(frame.f_locals.values()):
            if isinstance(item, nn.Module) and not isinstance(item, fx.GraphModule):
                inner = {id(unwrap(module)) for module in unwrap(item).modules()}
                if id(part) in inner and len(inner) > most:
                    largest, most = unwrap(item), len(inner)
        frame = frame.f_back
    return largest


def _input_name(node: fx.Node, tensors: dict[int, InputName]) -> InputName:
    source, real = source_of(node), real_input(node)
    if real is None:
        return InputName()
    if id(real) in tensors:
        return tensors[id(real)]
    if isinstance(real, nn.Parameter):
        return InputName((normalise(source.name),), "parameter")
    if compiled_root() is None and (argument := re.match(r"L\['(\w+)'\]$", source.name)):
        return InputName((argument[1],))
    return InputName()


def _join(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)
