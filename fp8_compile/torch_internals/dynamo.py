"""What Dynamo knows while it compiles a frame, and how it is asked to compile again."""

from __future__ import annotations

import contextlib
import gc
import sys
import zlib
from types import CodeType, FrameType
from typing import Any, Callable, Iterable, Iterator

import torch
from torch import fx, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo import config
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend, innermost_fn, reset_code
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import LocalSource, SyntheticLocalSource
from torch._guards import CompileContext

from .modules import compiled_in_place, unwrap

__all__ = ["innermost_fn", "reset_code"]


def compiled_root() -> nn.Module | None:
    """The module that ``torch.compile`` was called on, seen from inside a compilation: innermost on the stack. It is
    the user's module, also where a wrapper of data parallelism was compiled."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        if isinstance(owner, OptimizedModule):
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


def guard_variable(name: str) -> None:
    """The same for what a local variable of the frame holds."""
    guard_identity([LocalSource(name, is_input=True)])


def name_buffer(gm: fx.GraphModule, name: str) -> None:
    """Tell AOTAutograd where a buffer that was added to Dynamo's graph comes from. It wants to know, and no two may
    come from the same place. A part of a graph that was split for DDP has no such list."""
    sources = getattr(gm, "_param_name_to_source", None)
    if sources is not None:
        sources[name] = SyntheticLocalSource(name)


def count_codes(code: CodeType) -> int:
    """How many compiled codes Dynamo has for a frame."""
    return len(_debug_get_cache_entry_list(code))


def raise_limit(name: str, least: int, value: int) -> bool:
    """Set a limit of Dynamo's configuration to ``value`` where it is below ``least``; True if it was."""
    if getattr(config, name) >= least:
        return False
    setattr(config, name, value)
    return True


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
