"""Keep blocks apart that Dynamo would run with one compiled code.

After a graph break Dynamo compiles ``Block.forward`` once and runs it for ``blocks.0`` and ``blocks.1`` alike. Where a
pattern names only one of them, the code for one is wrong for the other: a guard on the identity of the module makes
Dynamo compile each by itself. Under delayed scaling that is so for every module: its code holds its scaling state.
"""

from __future__ import annotations

import logging

from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import LocalSource

from .module_names import Selection, compiled_root, frame_module, modules_read

log = logging.getLogger("fp8_compile")


def keep_each_apart(gm: fx.GraphModule) -> None:
    """Guard the modules that a graph reads, whatever their kind: code with a module's scaling state is for it alone."""
    for source, module in modules_read(gm).items():
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        root = compiled_root() or module
        alike = sum(type(other) is type(module) for other in root.modules())
        limit = dynamo_config.recompile_limit
        if alike >= limit:
            # At the limit Dynamo runs the rest of the modules uncompiled, in full precision, with no error.
            dynamo_config.recompile_limit = alike + limit
            log.info("recompile_limit is now %d: each %s is compiled by itself", alike + limit, type(module).__name__)


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
        install_guard(LocalSource(variable, is_input=True).make_guard(GuardBuilder.ID_MATCH))


def _treatment(name: str, module: nn.Module, selection: Selection) -> tuple[str | None, ...]:
    """What the patterns say about each part of a module."""
    parts = [part for part, _ in module.named_modules(prefix=name)]
    parameters = [part for part, _ in module.named_parameters(prefix=name)]
    return (*map(selection.reason_against, parts), *(selection.reason_against("", (part,)) for part in parameters))
