"""What Dynamo knows while it compiles a frame, and how it is asked to compile again."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import zlib
from types import CodeType, FrameType
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, fx, nn
from torch._dynamo import config
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.eval_frame import DisableContext, OptimizedModule, innermost_backend, innermost_fn, reset_code
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.source import SyntheticLocalSource
from torch._guards import CompileContext

from .modules import compiled_in_place, unwrap

__all__ = ["innermost_fn", "reset_code"]


def compiled_root() -> nn.Module | None:
    """The module that ``torch.compile`` was called on, seen from inside a compilation: innermost on the stack. It is
    the user's module, also where a wrapper of data parallelism was compiled."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        # Dynamo wraps what it is not to compile in the same class: the graph that DDP's buckets were cut out of.
        if isinstance(owner, OptimizedModule) and not isinstance(owner.dynamo_ctx, DisableContext):
            return unwrap(owner)
        if isinstance(owner, nn.Module) and compiled_in_place(owner):
            return unwrap(owner)
        frame = frame.f_back
    return None


def frame_code() -> Any:
    """The code object of the frame that Dynamo is compiling."""
    tx = translator()
    return tx.f_code if tx is not None else None


def frame_key() -> str:
    """What the code of the frame that Dynamo is compiling is known by, in this process and in others.

    What comes after a graph break is a frame of its own, whose name says on which line it begins; two of one line
    differ in their code.
    """
    code = frame_code()
    return "" if code is None else f"{code.co_name}:{code.co_firstlineno}:{zlib.crc32(code.co_code):08x}"


def frame_module() -> tuple[str, nn.Module | None]:
    """The module whose ``forward`` Dynamo is compiling, after a graph break not always the compiled one; and the
    name of the variable that holds it."""
    tx = translator()
    for variable in tx.f_code.co_varnames if tx is not None else ():  # a resumed frame has its stack before self
        if isinstance(tx.f_locals.get(variable), nn.Module):
            return variable, tx.f_locals[variable]
    return "", None


def modules_read(gm: fx.GraphModule) -> dict[Any, nn.Module]:
    """The outermost modules, by Dynamo's source for them, whose parameters and buffers a graph reads."""
    found: dict[Any, nn.Module] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        source, outermost = source_of(node), None
        while source is not None:
            if isinstance(resolved(source), nn.Module):
                outermost = source
            source = getattr(source, "base", None)
        if outermost is not None:
            found[outermost] = resolved(outermost)
    return {
        source: unwrap(module)
        for source, module in {id(module): (source, module) for source, module in found.items()}.values()
    }


def compiled_modules(gm: fx.GraphModule) -> list[nn.Module]:
    """The modules that Dynamo is compiling: the one that ``torch.compile`` was called on, or those that a compiled
    function runs, as far as its graph reads their parameters and buffers."""
    root = compiled_root()
    return [root] if root is not None else list(modules_read(gm).values())


def source_of(node: fx.Node) -> Any:
    """Where Dynamo says that an input comes from."""
    return getattr(node.meta.get("grapharg"), "source", None) or getattr(node, "_dynamo_source", None)


def real_input(node: fx.Node) -> Any:
    """The value that an input of the graph has now, where Dynamo knows where it comes from. A part of a graph that was
    split for DDP is compiled with fake ones."""
    source = source_of(node)
    return resolved(source) if source is not None else None


def resolved(source: Any) -> Any:
    """The value that a source leads to; None where it only exists at run time (symbolic sizes, ephemeral values)."""
    try:
        return translator().output.resolve_source_value(source)
    except Exception:
        return None


def variables_in_scope() -> Iterator[tuple[str, Any]]:
    """Local variables of the frame that Dynamo is compiling, and the globals that it names."""
    tx = translator()
    if tx is None:
        return
    yield from tx.f_locals.items()
    for name in tx.f_code.co_names:
        if name in tx.f_globals:
            yield name, tx.f_globals[name]


def translator() -> Any:
    """Dynamo's frame translator, while it is compiling; None when a backend is called by hand."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # imports Inductor

    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None


def compilation() -> Any:
    """The compilation that is under way: one object for all graphs that it makes of a frame."""
    return CompileContext.try_get()


def guard_identity(sources: Iterable[Any]) -> None:
    """Have the code that is being compiled run only for the very objects that these sources lead to."""
    for source in sources:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def guard_by(sources: Iterable[Any], check: Callable[[Any], bool], what: str) -> None:
    """Have the code that is being compiled run only for objects of which ``check`` is true, asked at every call;
    ``what`` says in the log of recompilations what did not hold."""

    def create(builder: Any, guard: Any) -> None:
        told = get_verbose_code_parts([f"{what} of {guard.name}"], guard)
        builder.get_guard_manager(guard).add_lambda_guard(check, told, guard.user_stack)

    for source in sources:
        install_guard(source.make_guard(create))


def own_copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph, to be changed: Dynamo goes over the inputs of its own after the backend returned."""
    graph = copy.deepcopy(gm.graph)
    for node, copied in zip(gm.graph.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder")):
        if hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source
    own = fx.GraphModule(gm, graph)
    for name, value in vars(gm).items():
        vars(own).setdefault(name, value)
    own.meta.update(gm.meta)
    return own


def add_inputs(gm: fx.GraphModule, inputs: Mapping[str, Tensor]) -> None:
    """Give a copy of Dynamo's graph further inputs, after its own, with these as examples. They are at the same
    addresses in every call for one module, as parameters are: what captures a CUDA graph need not copy them."""
    before = gm.graph.find_nodes(op="placeholder")
    at = before[-1] if before else gm.graph._root
    for name, example in inputs.items():
        with gm.graph.inserting_after(at):
            at = gm.graph.placeholder(name)
        at._dynamo_source = SyntheticLocalSource(name)  # AOTAutograd wants to know
        at.meta.update(example_value=example, tensor_dict={"_dynamo_static_input_type": "unguarded"})
    gm.recompile()


def running_frame(code: CodeType) -> FrameType | None:
    """The innermost frame on the stack that runs a code which Dynamo has compiled, under whatever code of its own."""
    known = (code.co_filename, code.co_name, code.co_firstlineno)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name, frame.f_code.co_firstlineno) == known:
            return frame
        frame = frame.f_back
    return None


def evaluated(source: Any, frame: FrameType) -> Any:
    """The value that a source leads to in a frame that runs; None where it leads nowhere."""
    try:
        return eval(source.name, {"L": frame.f_locals, "G": frame.f_globals})
    except Exception:
        return None


def still_compiled(code: CodeType) -> bool:
    """True while Dynamo knows a frame that it has compiled: false after ``torch._dynamo.reset()``."""
    return code in input_codes


def sizes_as_given() -> contextlib.AbstractContextManager[None]:
    """Keep Dynamo from making sizes symbolic that differ from those of an earlier call."""
    return config.patch(automatic_dynamic_shapes=False)


def compile_apart(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` for a while: what is compiled here and what was compiled elsewhere do not run each other's
    code."""
    options: dict[str, Any] = {"isolate_recompiles": True}  # the stubs of torch 2.13 do not know it
    return torch.compile(function, backend=backend, **options)


def wrappers_within(module: nn.Module) -> list[OptimizedModule]:
    """What ``torch.compile`` returned, for the module and the modules in it."""
    return [inner for inner in module.modules() if isinstance(inner, OptimizedModule)]


def wrappers_of(module: nn.Module) -> list[OptimizedModule]:
    """What ``torch.compile`` returned for a module, wherever it is kept."""
    return [item for item in gc.get_objects() if type(item) is OptimizedModule and item._orig_mod is module]


def backend_name(wrapper: OptimizedModule) -> str:
    """The name of the backend that a module was compiled with; "" where it is not known."""
    callback: Any = wrapper.dynamo_ctx.callback
    backend: Callable[..., Any] = innermost_backend(callback)
    if isinstance(backend, torch._TorchCompileInductorWrapper):
        return "inductor"
    return getattr(backend, "compiler_name", "")
