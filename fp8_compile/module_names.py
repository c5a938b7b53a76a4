"""What things in a graph are called in the user's model.

Dynamo gives a node the stack of modules it was traced in, keyed by ``id(module)``, with a path such as
``L['self'].blocks.0`` that is relative to whatever frame was being compiled: after a graph break that is a
submodule. Names here are relative to the compiled model, whichever frame the graph came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
import sys
import zlib
from typing import Any, Iterable, Iterator, Mapping, Sequence

from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DistributedDataParallel

from .output_heads import NAMED, OUTPUT_HEADS, output_heads, own_name


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
        self._modules, self._inputs, self._frame = modules, list(inputs), frame
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
        for prefix, root in _roots():
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
            return self._frame
        key, (path, _) = list(stack.items())[-1]
        identity = str(key).partition("@")[0]  # "<id>@1": the second call of one module
        if identity.isdigit() and int(identity) in self._modules:
            return self._modules[int(identity)]
        return _join(self._frame, normalise(path))

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
        desc = placeholder.meta.get("desc")
        if desc is None:
            return self._input_of_subgraph(placeholder)
        while (inner := getattr(desc, "base", None) or getattr(desc, "base_of", None)) is not None:
            desc = inner
        if (target := getattr(desc, "target", None)) is not None:
            return InputName((target,), "parameter" if desc.is_param() else "buffer")
        index = getattr(desc, "idx", None)
        if index is None or type(desc).__name__ != "PlainAOTInput" or index >= len(self._inputs):
            return InputName()
        return self._inputs[index]

    def _input_of_subgraph(self, placeholder: fx.Node) -> InputName:
        """A branch of ``torch.cond`` gets parameters as inputs without a word of what they are: one that has the shape
        of a matrix of the module that reads it is that matrix."""
        shape = tuple(getattr(placeholder.meta.get("val"), "shape", ()))
        modules = {self.module_of(user) for user in placeholder.users}
        for name, known in self._shapes.items():
            if len(known) > 1 and known == shape and name.rpartition(".")[0] in modules:
                return InputName((name,), "parameter")
        return InputName()


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which layers are rewritten: include, less exclude, less output heads that nobody asked for."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    heads: Mapping[str, str] = dataclasses.field(default_factory=dict)  # weight -> why it is that of an output head

    def check(self, known: Sequence[str]) -> None:
        """Every pattern must match something: a typo would otherwise rewrite what was meant to be spared."""
        for field, patterns in (("exclude", self.exclude), ("include", self.include)):
            for pattern in patterns:
                if pattern != "*" and not fnmatch.filter(known, pattern):
                    raise ValueError(
                        f"{field} pattern {pattern!r} matches no module or parameter of the model; "
                        f"nearest names: {', '.join(_nearest(pattern, known)) or 'the model has no named modules'}"
                    )

    def reason_against(self, module: str, weights: Sequence[str] = ()) -> str | None:
        """Why a layer is left alone, or None."""
        names = {name for start in (module, *weights) for name in _with_ancestors(start)}
        for pattern in self.exclude:
            if fnmatch.filter(names, pattern):
                return f"excluded by {pattern!r}"
        asked_for = [pattern for pattern in self.include if pattern == "*" or fnmatch.filter(names, pattern)]
        if not asked_for:
            return "not in include"
        why = next((self.heads[name] for name in weights if name in self.heads), None)
        if why is None and own_name(module) in OUTPUT_HEADS:
            why = NAMED
        return f"{why} (name it in include to rewrite it)" if why and asked_for == ["*"] else None


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


def plain_module(model: Any) -> Any:
    """The user's module behind what ``torch.compile`` and ``DistributedDataParallel`` wrap around it."""
    while True:
        if isinstance(model, OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, DistributedDataParallel):
            model = model.module
        else:
            return getattr(model, "_orig_mod", model)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` was called on the module, or its own ``compile()``."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def frame_key() -> str:
    """What the code of the frame that Dynamo is compiling is known by, in this process and in others.

    What comes after a graph break is a frame of its own, whose name says on which line it begins; two of one line
    differ in their code.
    """
    code = frame_code()
    return "" if code is None else f"{code.co_name}:{code.co_firstlineno}:{zlib.crc32(code.co_code):08x}"


def compiled_root() -> nn.Module | None:
    """The module that ``torch.compile`` was called on, seen from inside a compilation: innermost on the stack."""
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        if isinstance(owner, OptimizedModule):
            return owner._orig_mod
        if isinstance(owner, nn.Module) and owner._compiled_call_impl is not None:
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def modules_read(gm: fx.GraphModule) -> dict[Any, nn.Module]:
    """The outermost modules, by Dynamo's source for them, whose parameters and buffers a graph reads."""
    found: dict[Any, nn.Module] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        source, outermost = _source_of(node), None
        while source is not None:
            if isinstance(_resolved(source), nn.Module):
                outermost = source
            source = getattr(source, "base", None)
        if outermost is not None:
            found[outermost] = _resolved(outermost)
    return {
        source: getattr(module, "_orig_mod", module)
        for source, module in {id(module): (source, module) for source, module in found.items()}.values()
    }


def frame_code() -> Any:
    """The code object of the frame that Dynamo is compiling."""
    tx = _translator()
    return tx.f_code if tx is not None else None


def _roots() -> list[tuple[str, nn.Module]]:
    """(prefix, module): the compiled module; for a compiled function, the modules it can see."""
    root = compiled_root()
    if root is not None:
        return [("", plain_module(root))]
    tx = _translator()
    if tx is None:
        return []
    seen = {name: item for name, item in _scope(tx) if isinstance(item, nn.Module)}
    unwrapped = {name: getattr(module, "_orig_mod", module) for name, module in seen.items()}
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
    for _, module in _roots():
        reasons |= output_heads(_whole_model(module), gm, values)
    return {name: why for key, why in reasons.items() if key in tensors for name in tensors[key].names}


def _whole_model(part: nn.Module) -> nn.Module:
    """The largest module that has ``part`` in it, among the variables of the functions that are running."""
    frame, largest, most = sys._getframe(), part, 0
    while frame is not None:
        for item in list(frame.f_locals.values()):
            if isinstance(item, nn.Module) and not isinstance(item, fx.GraphModule):
                inner = {id(plain_module(module)) for module in plain_module(item).modules()}
                if id(part) in inner and len(inner) > most:
                    largest, most = plain_module(item), len(inner)
        frame = frame.f_back  # type: ignore[assignment]
    return largest


def _scope(tx: Any) -> Iterator[tuple[str, Any]]:
    yield from tx.f_locals.items()
    for name in tx.f_code.co_names:
        if name in tx.f_globals:
            yield name, tx.f_globals[name]


def _translator() -> Any:
    """Dynamo's frame translator, while it is compiling; None when a backend is called by hand."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None


def _source_of(node: fx.Node) -> Any:
    """Where Dynamo says that an input comes from."""
    return getattr(node.meta.get("grapharg"), "source", None) or getattr(node, "_dynamo_source", None)


def _resolved(source: Any) -> Any:
    """The value behind a source; None for sources that only exist at run time (symbolic sizes, ephemeral values)."""
    try:
        return _translator().output.resolve_source_value(source)
    except Exception:
        return None


def real_input(node: fx.Node) -> Any:
    """The value that an input of the graph has now, where Dynamo knows where it comes from. A part of a graph that was
    split for DDP is compiled with fake ones."""
    source = _source_of(node)
    return _resolved(source) if source is not None else None


def _input_name(node: fx.Node, tensors: dict[int, InputName]) -> InputName:
    source, real = _source_of(node), real_input(node)
    if real is None:
        return InputName()
    if id(real) in tensors:
        return tensors[id(real)]
    if isinstance(real, nn.Parameter):
        return InputName((normalise(source.name),), "parameter")
    if compiled_root() is None and (argument := re.match(r"L\['(\w+)'\]$", source.name)):
        return InputName((argument[1],))
    return InputName()


def frame_module() -> tuple[str, nn.Module | None]:
    """The module whose ``forward`` Dynamo is compiling, after a graph break not always the compiled one; and the
    name of the variable that holds it."""
    tx = _translator()
    for variable in tx.f_code.co_varnames if tx is not None else ():  # a resumed frame has its stack before self
        if isinstance(tx.f_locals.get(variable), nn.Module):
            return variable, tx.f_locals[variable]
    return "", None


def _join(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)


def _with_ancestors(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _nearest(pattern: str, known: Sequence[str]) -> list[str]:
    plain = pattern.replace("*", "").strip(".")
    return difflib.get_close_matches(plain, known, n=5, cutoff=0.3) or list(known[:5])
