"""Keep blocks apart that Dynamo would run with one compiled code.

After a graph break Dynamo compiles ``Block.forward`` once and runs it for ``blocks.0`` and ``blocks.1`` alike. Where a
pattern names only one of them, the code for one is wrong for the other: a guard on the identity of the module makes
Dynamo compile each by itself. Under delayed scaling that is so for every module: its code holds its scaling state.

Dynamo counts the codes of a frame and gives up at ``recompile_limit``, 8 by default: the rest then runs uncompiled, in
full precision, and only a line in torch's log says so. The limit is meant for code that is compiled again and again for
one module. Modules that come new to a frame (blocks, models of a sweep, everything in an ``nn.Sequential``) raise it.
"""

from __future__ import annotations

import logging

from torch import fx, nn

from fp8_compile.scaling.model_state import model_state
from fp8_compile.selection import Selection
from fp8_compile.torch_internals.dynamo import (
    compiled_root,
    count_codes,
    frame_code,
    frame_module,
    guard_identity,
    guard_variable,
    modules_read,
    raise_limit,
)

log = logging.getLogger("fp8_compile")

ROOM = 8  # codes of a frame for one module: forms of its inputs, training and inference


def keep_each_apart(gm: fx.GraphModule) -> None:
    """Guard the modules that a graph reads, whatever their kind: code with a module's scaling state is for it alone."""
    guard_identity(modules_read(gm))


def make_room(gm: fx.GraphModule) -> None:
    """Have Dynamo compile the next module that comes to this frame, if this one is new to it."""
    code, root = frame_code(), compiled_root()
    if code is None:
        return
    modules = [*([root] if root is not None else ()), *modules_read(gm).values()]
    if all(code in model_state(module).frames for module in modules):
        return
    for module in modules:
        model_state(module).frames.add(code)
    codes = count_codes(code) + 1
    for name, room in (("recompile_limit", ROOM), ("accumulated_recompile_limit", 2 * ROOM)):
        if raise_limit(name, codes + ROOM, codes + room):
            log.info("torch._dynamo.config.%s is now %d: several modules run %s", name, codes + room, code.co_name)


def keep_apart(selection: Selection) -> None:
    """Guard the frame's module if another of its class is treated differently."""
    variable, module = frame_module()
    root = compiled_root()
    if module is None or root is None or module is root:
        return
    treatments = {
        _treatment(name, other, selection) for name, other in root.named_modules() if type(other) is type(module)
    }
    if len(treatments) > 1:
        guard_variable(variable)


def _treatment(name: str, module: nn.Module, selection: Selection) -> tuple[str | None, ...]:
    """What the patterns say about each part of a module."""
    parts = [part for part, _ in module.named_modules(prefix=name)]
    parameters = [part for part, _ in module.named_parameters(prefix=name)]
    return (*map(selection.reason_against, parts), *(selection.reason_against("", (part,)) for part in parameters))
